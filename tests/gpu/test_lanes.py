"""Lanes over NCCL: two ranks have the bits of one, eagerly and as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from flatfsdp import Lanes, Precision, by_class
from flatfsdp.comm.launch import Rank
from flatfsdp.models.gpt import GPT, Block
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.switches import Sharding
from flatfsdp.parity.world import Spread, verify_world
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.gpu.models import SMALL, tokens
from tests.support.models import repeatable
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU


STEPS, MICROBATCHES = 8, 4


def batches(rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return ((each, each) for each in tokens(SMALL, rank, STEPS * MICROBATCHES))


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lanes", [2, 4], ids=["one turn", "two turns"])
@on_ranks(2, backend="nccl")
@repeatable()
def test_two_ranks_have_the_bits_of_one(rank: int, world_size: int, lanes: int, reduce: torch.dtype) -> None:
    usual = Sharding(Precision(compute=torch.bfloat16, reduce=reduce))
    graphs = replace(usual, replay=True)
    spreads = [
        Spread("1 rank", usual, 1),
        Spread("1 rank, replayed", graphs, 1),
        Spread("2 ranks", usual, 2),
        Spread("2 ranks, replayed", graphs, 2),
        Spread("2 ranks, ZeRO-2, replayed", replace(graphs, reshard=False), 2),
    ]
    job = ModelJob(partial(GPT, SMALL), batches, by_class(Block), steps=STEPS, microbatches=MICROBATCHES)
    here = Rank(rank, world_size, torch.device("cuda", torch.cuda.current_device()))
    rows = list(verify_world(job, Lanes(lanes), spreads, here))
    assert [line for row in rows for line in row.lines()] == []
    assert len(rows) == 4 and len({*rows[0].on.losses}) == STEPS
