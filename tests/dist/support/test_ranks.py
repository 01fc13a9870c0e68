"""Tests that run on ranks get their arguments there, and fail with what happened there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks


@pytest.mark.parametrize("scale", [1, 10])
@on_ranks(2, 3)
def test_parameters_fixtures_and_several_world_sizes(
    rank: int, world_size: int, scale: int, tmp_path: Path
) -> None:
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    total = torch.tensor(scale)
    dist.all_reduce(total)
    assert total == scale * world_size
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


@pytest.mark.parametrize(("world_size", "expected"), [(1, 0), (2, 1)])
@on_ranks()
def test_a_world_size_of_its_own(rank: int, expected: int) -> None:
    last = torch.tensor(rank)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    assert last == expected


@on_ranks(2)
def _is_the_first(rank: int, expected: list[int]) -> None:
    assert [rank, 7] == expected


def test_a_failure_names_its_rank_the_line_and_the_values() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        _is_the_first(expected=[0, 7])
    message = str(failure.value)
    assert "--- rank 1 ---" in message and "rank 0" not in message
    assert "in _is_the_first" in message and "assert [1, 7] == [0, 7]" in message
    assert "support/ranks.py" not in message


def test_ranks_that_fail_alike_have_one_traceback() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        _is_the_first(expected="nothing")
    assert str(failure.value).count("Traceback") == 2
    with pytest.raises(pytest.fail.Exception, match="--- rank 0, 1 ---") as failure:
        _is_the_first(unexpected=0)
    assert str(failure.value).count("Traceback") == 1


@on_ranks(2)
def _ends(rank: int) -> None:
    if rank == 1:
        os._exit(1)


def test_a_rank_that_dies_is_named_and_the_next_test_has_new_ones() -> None:
    with pytest.raises(pytest.fail.Exception, match="--- rank 1 ---\nthe process died"):
        _ends()
    with pytest.raises(pytest.fail.Exception, match="assert \\[1, 7\\]"):
        _is_the_first(expected=[0, 7])
