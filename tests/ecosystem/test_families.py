"""Hugging Face models train under FlatFSDP as in plain PyTorch; fused ones equal fused ones."""

from __future__ import annotations

import pytest

from tests.support.both_forms import WAYS, sharded
from tests.support.ecosystem.covering import covering
from tests.support.ecosystem.families import needs_transformers
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import assert_same_training, plain, train_plain, train_sharded
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


# Two families cover all combinations of way, flag and ZeRO; each one covers all pairs of them.
CASES = list(covering(list(MODELS), list(WAYS), ["on", "off"], ["zero3", "zero2"]))


@pytest.mark.parametrize(("name", "way", "flag", "zero"), CASES)
@on_ranks(2)
def test_three_steps_of_adamw(rank: int, world_size: int, name: str, way: str, flag: str, zero: str) -> None:
    family = MODELS[name]
    options = {"optimize_backward_concat": flag == "on", "reshard_after_forward": zero == "zero3"}
    model = sharded(way, family.build(), family.is_unit, **options)
    found = train_sharded(model, rank)
    assert_same_training(found, plain(name, rank, world_size))
    if family.is_fused:
        by_transformers = train_plain(family.plain.build(), rank, world_size)
        assert found.losses == pytest.approx(by_transformers.losses, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_class_and_names_stay(name: str) -> None:
    family = MODELS[name]
    expected, model = family.build(), family.build()
    found = sharded("in place", model, family.is_unit)
    assert found is model and isinstance(found, type(expected))
    assert type(found).__name__ == family.model
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert [n for n, _ in found.named_modules()] == [n for n, _ in expected.named_modules()]
