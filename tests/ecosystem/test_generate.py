"""`generate` of a model sharded in place returns what plain transformers does, rank by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import shard
from tests.support.ecosystem.families import generated, needs_transformers
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import train_sharded
from tests.support.ranks import on_ranks

pytestmark = needs_transformers

GENERATING = [name for name, family in MODELS.items() if family.generates]
PROMPT = (3, 5, 7, 9)


def trained_and_plain(name: str, rank: int, **options: Any) -> tuple[Any, Any]:
    """A model after one step, in place, and a plain one with its values; both in evaluation mode."""
    family = MODELS[name]
    model, plain = shard(family.build(), family.is_unit, **options), family.plain.build()
    plain.load_state_dict(train_sharded(model, rank, steps=1).state)
    return model.eval(), plain.eval()


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("reshard", [True, False], ids=["zero3", "zero2"])
@on_ranks(2)
def test_ranks_write_texts_of_different_lengths(rank: int, name: str, reshard: bool) -> None:
    """Every token gathers, so the rank that finishes first goes on with the others."""
    model, plain = trained_and_plain(name, rank, reshard_after_forward=reshard)
    prompt, length = PROMPT[rank:], 3 + 4 * rank
    assert torch.equal(generated(model, prompt, length), generated(plain, prompt, length))
    # Training continues.
    assert train_sharded(model.train(), rank, steps=1).losses


@pytest.mark.parametrize("name", ["Llama", "T5", "Llama, fused"])
@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@on_ranks(2)
def test_unsharded_every_rank_writes_what_it_likes(rank: int, name: str, flag: bool) -> None:
    """Nothing is communicated inside, so ranks may call the model unequally often."""
    model, plain = trained_and_plain(name, rank, optimize_backward_concat=flag)
    with model.unsharded():
        for length in range(1, 3 + 2 * rank):
            assert torch.equal(generated(model, PROMPT, length), generated(plain, PROMPT, length))
    assert train_sharded(model.train(), rank, steps=1).losses


@on_ranks(2)
def test_values_that_an_optimizer_has_written_are_used(rank: int) -> None:
    """Generation between two steps uses the newest weights, whatever was gathered before."""
    model, plain = trained_and_plain("Llama", rank, reshard_after_forward=False)
    before = generated(model, PROMPT, 8)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.neg_()
            other.neg_()
    after = generated(model, PROMPT, 8)
    assert torch.equal(after, generated(plain, PROMPT, 8))
    assert not torch.equal(before, after)
