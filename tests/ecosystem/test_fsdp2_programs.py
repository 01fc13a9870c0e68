"""Programs written for PyTorch's FSDP2 run with that one call replaced, and have FSDP2's losses."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import fully_shard

import flatfsdp
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.fsdp2_programs import PROGRAMS, FullyShard
from tests.support.ranks import on_ranks


def losses_of(program: str, shard: FullyShard, rank: int) -> list[float]:
    with shared_folder() as folder:
        return PROGRAMS[program](shard, rank, folder)


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_with_fsdp2(rank: int, program: str) -> None:
    """The programs are right, and their losses depend on the rank's data."""
    losses = losses_of(program, fully_shard, rank)
    assert len(losses) > 6 and losses[0] != losses[1]


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_with_flatfsdp(rank: int, program: str) -> None:
    found = losses_of(program, flatfsdp.shard, rank)
    assert found == pytest.approx(losses_of(program, fully_shard, rank), rel=1e-6)
