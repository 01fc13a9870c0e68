"""LoRA with PEFT: adapters train, are saved for plain PEFT, and can be switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.both_forms import WAYS, sharded
from tests.support.ecosystem.families import FAMILIES, batches_of, generated, needs_peft, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.training import (
    assert_same_training,
    assert_same_values,
    train_plain,
    train_sharded,
)
from tests.support.ranks import on_ranks

pytestmark = [needs_transformers, needs_peft]

LLAMA = FAMILIES["Llama"]


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    base = LLAMA.build()
    torch.manual_seed(1)
    # Weights that change the output from the beginning.
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))


@pytest.mark.parametrize("reshard", [True, False], ids=["zero3", "zero2"])
@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_adapters_train(rank: int, world_size: int, way: str, flag: bool, reshard: bool) -> None:
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    model = sharded(way, with_lora(), LLAMA.is_unit, **options)
    assert_same_training(train_sharded(model, rank), train_plain(with_lora(), rank, world_size))


@on_ranks(2)
def test_an_adapter_is_saved_by_one_rank_and_read_by_plain_peft(rank: int) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    model = sharded("in place", with_lora(), LLAMA.is_unit)
    state = train_sharded(model, rank).state
    with shared_folder() as folder:
        model.save_pretrained(folder / str(rank))
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["0"]
        files = {path.name for path in (folder / "0").iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        plain = PeftModel.from_pretrained(LLAMA.build(), folder / "0")
    assert_same_values(plain.state_dict(), state)
    adapter = get_peft_model_state_dict(plain)
    assert len(adapter) == 2 * 2 * 2
    assert all(torch.equal(state[key.replace(".weight", ".default.weight")], adapter[key]) for key in adapter)


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@on_ranks(2)
def test_a_disabled_adapter_leaves_the_base_model(rank: int, world_size: int, flag: bool) -> None:
    """As a reference model of preference training does, between forward and backward, too."""
    model = sharded("in place", with_lora(), LLAMA.is_unit, optimize_backward_concat=flag)
    plain, base = with_lora(), LLAMA.build()
    (batch, _) = batches_of(rank, 0)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**batch).logits, base(**batch).logits)
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    prompt = (3, 5, 7)[rank:]
    model.eval(), plain.eval(), base.eval()
    with model.disable_adapter():
        assert torch.equal(generated(model, prompt, 3), generated(base, prompt, 3))
    assert torch.equal(generated(model, prompt, 3), generated(plain, prompt, 3))
    trained = train_sharded(model.train(), rank)
    assert_same_training(trained, train_plain(plain.train(), rank, world_size))
