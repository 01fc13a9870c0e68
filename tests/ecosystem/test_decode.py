"""FP8 models of transformers generate text and recompute activations, inside and outside of `autocast`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import Precision, microbatches, shard
from flatfsdp.compat.transformers import fuse
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import convert
from tests.support.ecosystem.families import FAMILIES, generated, needs_transformers
from tests.support.ranks import on_ranks

pytestmark = needs_transformers

FAMILY = FAMILIES["Llama"]
PROMPT = (3, 5, 7, 9, 11)
STORED = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
IN_LAYERS = Precision(compute=torch.bfloat16, fp8_weights="in_layers")

CHANGES = {"converted": lambda model: convert(model, lambda _, name: "_proj" in name), "fused": fuse}
JOINTS = {
    "converted": [["q_proj"], ["k_proj"], ["v_proj"], ["o_proj"], ["gate_proj"], ["up_proj"], ["down_proj"]],
    "fused": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
}
"""Weights of a layer that have one scale."""


def build(change: str, precision: Precision) -> Any:
    """A sharded model."""
    return shard(CHANGES[change](FAMILY.build()), FAMILY.is_unit, precision=precision)


def dequantized(change: str) -> Any:
    """A model in bf16 whose projections have their values in E4M3 with power-of-two scales.

    It is a plain one, or a fused one that is sharded: with a cache, transformers computes plain ones.
    """
    model = FAMILY.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for layer in model.model.layers:
        for names in JOINTS[change]:
            modules: list[Any] = [
                each for name, each in layer.named_modules() if name.split(".")[-1] in names
            ]
            scale = 448 / max(each.weight.float().abs().max() for each in modules)
            scale = torch.exp2(torch.floor(torch.log2(scale)))
            for each in modules:
                each.weight.data = ((each.weight * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()
    if change == "converted":
        return model
    precision = Precision(compute=torch.bfloat16)
    return shard(fuse(model, fp8=False), FAMILY.is_unit, precision=precision)


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_weights_kept_in_fp8_are_read_outside_of_autocast(rank: int, change: str) -> None:
    """Evaluation, decoding and training equal GEMMs in 16 bits with the same values."""
    model, other = build(change, STORED), dequantized(change)
    tokens = torch.tensor([PROMPT])
    for each in (model, other):
        each(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
        assert torch.equal(logits, other.eval()(input_ids=tokens).logits)
    length = 4 + rank
    text = generated(model, PROMPT[rank:], length)
    with model.unsharded():
        assert torch.equal(text, generated(model, PROMPT[rank:], length))
    assert torch.equal(text, generated(other, PROMPT[rank:], length))
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        expected = float(theirs.grad.norm())
        assert float(ours.grad.norm()) == pytest.approx(expected, rel=1e-2), name


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_a_few_tokens_in_autocast_are_in_fp8(rank: int, change: str) -> None:
    """Text of any length is decoded; stored weights are bit-equal to those that layers cast themselves."""
    models = [build(change, precision).eval() for precision in (STORED, IN_LAYERS)]
    with autocast(recipe=CurrentScaling()):
        one, other = (generated(model, PROMPT[rank:], 5 + rank) for model in models)
        with torch.no_grad():
            logits = models[0](input_ids=torch.tensor([PROMPT])).logits
    assert one.shape == (1, len(PROMPT) - rank + 5 + rank)
    assert torch.equal(one, other)
    with torch.no_grad():
        assert not torch.equal(logits, models[0](input_ids=torch.tensor([PROMPT])).logits)


RECIPES = {"delayed": DelayedScaling(amax_history_len=4), "current": CurrentScaling()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_gradient_checkpointing_as_transformers_switches_it_on(rank: int, change: str, recipe: str) -> None:
    """Transformers knows nothing of FP8: losses, gradients and scales are those without checkpoints."""
    found = []
    for use_reentrant in (None, False, True):
        precision = STORED if recipe == "current" else IN_LAYERS
        model = build(change, precision).train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(2):
            tokens = torch.randint(1, 64, (2, 2, 8), generator=torch.Generator().manual_seed(2 * step + rank))
            for microbatch in microbatches(model, list(tokens)):
                with autocast(recipe=RECIPES[recipe]):
                    loss = model(input_ids=microbatch, labels=microbatch).loss
                loss.backward()
                seen.append(loss.detach())
            seen += [plain(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found.append([*seen, *(value.clone() for name, value in model.named_buffers() if "fp8" in name)])
    assert recipe == "current" or len(found[0]) > 2 * (5 + len(list(model.parameters())))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
