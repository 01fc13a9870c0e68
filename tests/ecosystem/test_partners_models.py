"""Changes of a model by Hugging Face's libraries, after FlatFSDP has sharded it, are refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from flatfsdp import by_class, shard
from flatfsdp.compat.transformers import fuse
from tests.support.ranks import on_ranks

pytest.importorskip("transformers")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def _sharded(fused: bool, net: Any = None) -> tuple[Any, dict[str, torch.nn.Module]]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    net = _llama() if net is None else net
    model = shard(fuse(net) if fused else net, by_class(LlamaDecoderLayer))
    return model, dict(model.named_modules())


def _loss(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_lora_after_sharding(rank: int, fused: bool) -> None:
    import peft

    model, modules = _sharded(fused)
    with pytest.raises(TypeError, match=r"q_proj of LlamaAttention brings parameter .*LoRA"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_resized_embeddings_after_sharding(rank: int, fused: bool) -> None:
    model, modules = _sharded(fused)
    with (
        pytest.raises((TypeError, RuntimeError), match="resize_token_embeddings"),
        model.summon_full_params(),
    ):
        model.resize_token_embeddings(50)
    assert dict(model.named_modules()) == modules
    assert torch.isfinite(_loss(model))


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_adafactor(rank: int, fused: bool) -> None:
    from transformers.optimization import Adafactor

    model, _ = _sharded(fused)
    with pytest.raises(ValueError, match="Adafactor needs whole parameters"):
        Adafactor(model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_an_optimizer_from_before(rank: int, fused: bool) -> None:
    net = _llama()
    optimizer = torch.optim.AdamW(net.parameters())
    model, _ = _sharded(fused, net)
    _loss(model).backward()
    with pytest.raises(ValueError, match="as it was before the model was sharded"):
        optimizer.step()
