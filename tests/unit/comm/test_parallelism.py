"""How ranks share a model, as numbers."""

from __future__ import annotations

from typing import Any

import pytest

from flatfsdp.comm.parallelism import Parallelism


def test_shards_fill_the_ranks_that_are_left() -> None:
    found = Parallelism.over(64, pp=2, dp_replicate=2, tp=4, sequence_parallel=True)
    assert found == Parallelism(2, 2, 4, 4, True)
    assert (found.world, found.dp, found.sequence_ranks) == (64, 8, 4)
    assert Parallelism.over(12, dp_shard=6, tp=2) == Parallelism(dp_shard=6, tp=2)
    for world in (8, 16):
        found = Parallelism.over(world, dp_replicate=-1, dp_shard=4, tp=2)
        assert found == Parallelism(dp_replicate=world // 8, dp_shard=4, tp=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_replicate": -1}, "dp_replicate and dp_shard are both -1; pass one of them"),
        (
            {"dp_replicate": -1, "dp_shard": 4},
            r"dp_replicate \? x dp_shard 4 needs a multiple of 4 ranks, and",
        ),
        ({"dp_replicate": -2, "dp_shard": 4}, "dp_replicate is -2; it has to be at least 1, or -1 for all"),
    ],
)
def test_sizes_that_do_not_give_the_ranks(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallelism.over(6, **sizes)


@pytest.mark.parametrize(
    ("parallelism", "text"),
    [
        (Parallelism(), "no parallelism"),
        (Parallelism(pp=2, dp_shard=4), "pp 2 x dp_shard 4"),
        (Parallelism(4, 2, 16, 8, True), "pp 4 x dp_replicate 2 x dp_shard 16 x tp 8 + SP"),
    ],
)
def test_text(parallelism: Parallelism, text: str) -> None:
    assert str(parallelism) == text


def test_a_sequence_is_shared_by_tensor_parallel_ranks_alone() -> None:
    assert Parallelism(dp_shard=2, sequence_parallel=True) == Parallelism(dp_shard=2)


@pytest.mark.parametrize("sizes", [{"pp": 0}, {"tp": -1}, {"dp_replicate": 0}, {"dp_shard": -1}])
def test_sizes_are_positive(sizes: dict[str, Any]) -> None:
    ((name, size),) = sizes.items()
    with pytest.raises(ValueError, match=f"{name} is {size}; it has to be at least 1"):
        Parallelism(**sizes)
