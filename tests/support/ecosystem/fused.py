"""Tiny models that `fuse` knows, with values that tell each part from another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfsdp import microbatches
from tests.support.ecosystem.families import FAMILIES, VOCAB, Batch, Family, batches_of

_DECODER = FAMILIES["Llama"].sizes

FUSED = {
    "Llama": FAMILIES["Llama"],
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", "Qwen2DecoderLayer", _DECODER),
    "Qwen3": FAMILIES["Qwen3"],
    "Mistral": Family(
        "MistralForCausalLM", "MistralConfig", "MistralDecoderLayer", {**_DECODER, "sliding_window": 4}
    ),
    "Mixtral": FAMILIES["Mixtral"],
    "GPT-2": FAMILIES["GPT-2"],
}
"""Classes of parts as transformers computes them."""

MODELS = {**FAMILIES, **{f"{name}, fused": family._replace(is_fused=True) for name, family in FUSED.items()}}
"""All families; those that `fuse` knows, once more, fused."""


def build(name: str, **options: Any) -> Any:
    """A model for training, whose norms and biases are no ones and zeros."""
    model = FUSED[name].build(**options).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(**others: Tensor) -> Batch:
    """Two sequences, int64 [2, 9]."""
    tokens = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens, "labels": tokens, **others}


def loss_and_grads(model: Any, **inputs: Any) -> list[Tensor]:
    """The loss, and the gradients of the parameters that get any."""
    model = copy.deepcopy(model)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Relative to each tensor; those that nearly cancel out, to the largest one."""
    assert len(found) == len(expected)
    found, expected = ([each.detach() for each in tensors] for tensors in (found, expected))
    floor = 1e-3 * max(float(each.norm()) for each in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= tolerance * max(float(other.norm()), floor)


def train(model: Any, ranks: Sequence[int], *, is_sharded: bool) -> list[Tensor]:
    """Two steps of SGD of two microbatches a rank: losses, and how all values have changed."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        for rank in ranks:
            batches = batches_of(rank, step)
            for each in microbatches(model, batches) if is_sharded else batches:
                loss = model(**each).loss
                (loss / len(ranks)).backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    return [*losses, *(after[name] - value for name, value in before.items())]
