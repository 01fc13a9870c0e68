"""Hugging Face models train under FlatFSDP as in plain PyTorch; fused ones equal fused ones."""

from __future__ import annotations

import pytest

from flatfsdp import shard
from tests.support.ecosystem.families import needs_transformers
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import assert_same_training, plain, train_sharded
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("zero", ["zero3", "zero2"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_three_steps_of_adamw(rank: int, world_size: int, name: str, flag: str, zero: str) -> None:
    family = MODELS[name]
    options = {"optimize_backward_concat": flag == "on", "reshard_after_forward": zero == "zero3"}
    model = shard(family.build(), family.is_unit, **options)
    found = train_sharded(model, rank)
    assert_same_training(found, plain(name, rank, world_size))
    if family.is_fused:
        by_transformers = plain(name.removesuffix(", fused"), rank, world_size)
        assert found.losses == pytest.approx(by_transformers.losses, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_class_and_names_stay(name: str) -> None:
    family = MODELS[name]
    expected, model = family.build(), family.build()
    found = shard(model, family.is_unit)
    assert found is model and isinstance(found, type(expected))
    assert type(found).__name__ == family.model
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert [n for n, _ in found.named_modules()] == [n for n, _ in expected.named_modules()]
