"""Tiny models of Hugging Face transformers, from configurations: nothing is downloaded.

transformers takes seconds to import.  Only ranks import it, once, where they build their first model.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flatfsdp.compat.transformers import fuse

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs PEFT")

VOCAB = 64
Batch = dict[str, Tensor]
"""Arguments of a model, int64 [batch, sequence] each."""


class Family(NamedTuple):
    """One architecture.

    Attributes:
        model, config, layer: names of classes; each `layer` becomes a unit.
        sizes: of the configuration.
        generates: whether it writes text, and not only fills gaps.
        is_fused: whether our kernels compute it.
    """

    model: str
    config: str
    layer: str
    sizes: dict[str, Any]
    generates: bool = True
    is_fused: bool = False

    def build(self, **options: Any) -> Any:
        """A fresh model in FP32, the same values every time.

        Fused, gradients of tied weights are computed by autograd: FlatFSDP adds to main_grad once a use, and
        then nothing else has its bits.

        Args:
            options: further ones of the configuration.
        """
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, self.config)(**{**self.sizes, **options})
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config)
        if not self.is_fused:
            return model
        return fuse(model, fuse_wgrad_accumulation=False if config.tie_word_embeddings else None)

    @property
    def plain(self) -> Family:
        """The same family, computed by transformers itself."""
        return self._replace(is_fused=False)

    def is_unit(self, name: str, module: torch.nn.Module, numel: int) -> bool:
        """The wrap policy."""
        return type(module).__name__ == self.layer


_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
_BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}

FAMILIES = {
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", "LlamaDecoderLayer", _DECODER),
    "Qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3Config", "Qwen3DecoderLayer", {**_DECODER, "tie_word_embeddings": True}
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        "GPT2Block",
        {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "BERT": Family(
        "BertForMaskedLM",
        "BertConfig",
        "BertLayer",
        {**_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        generates=False,
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        "T5Block",
        {**_T5, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "Mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        "MixtralDecoderLayer",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def adapted(model: Any, seed: int = 1, **options: Any) -> Any:
    """With LoRA of PEFT, whose weights change the output from the beginning.

    Args:
        model: a plain model.
        seed: of the weights.
        options: further ones of `LoraConfig`.
    """
    peft = importlib.import_module("peft")
    torch.manual_seed(seed)
    own = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**{**own, **options}))


def batches_of(rank: int, step: int, count: int = 2) -> list[Batch]:
    """The microbatches of one step of one rank: of two sequences, one of which is padded."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for _ in range(count):
        tokens = torch.randint(1, VOCAB, (2, 8), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 6:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


def generated(model: Any, prompt: Sequence[int], length: int) -> Tensor:
    """The most likely continuation, int64 [1, tokens], with `length` tokens that are new."""
    tokens = torch.tensor([list(prompt)])
    return model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
    )


SAMPLES = 20
"""On two ranks five microbatches of two each: steps of two, two and one."""


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences with ignored labels, a different number in each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels}
