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
def test_losses_are_those_of_fsdp2(rank: int, program: str) -> None:
    expected = losses_of(program, fully_shard, rank)
    assert len(expected) > 6 and expected[0] != expected[1]
    assert losses_of(program, flatfsdp.shard, rank) == pytest.approx(expected, rel=1e-6)
