"""`verify_world`: any number of ranks has the bits of one, and a lane out of place is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import Precision
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Rank
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.switches import Sharding
from flatfsdp.parity.world import Spread, verify_world
from tests.support.ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x).tanh())
        return F.mse_loss(x, y)


def batches(rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield {name: torch.randn(3, 12, generator=generator) for name in "xy"}


def job(microbatches: int = 8) -> ModelJob:
    return ModelJob(Net, batches, steps=3, microbatches=microbatches, lr=1e-2, max_norm=0.1)


def spreads(precision: Precision | None = None) -> list[Spread]:
    usual = Sharding(precision or Precision())
    off = Sharding(usual.precision, flag=False, reshard=False)
    return [
        Spread("1 rank", usual, 1),
        Spread("2 ranks", usual, 2),
        Spread("4 ranks, ZeRO-2, flag off", off, 4),
        Spread("4 replicas", usual, 4, 4),
    ]


def here() -> Rank:
    return Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


@pytest.mark.parametrize("precision", [Precision(), Precision(compute=torch.bfloat16)], ids=["fp32", "bf16"])
@on_ranks(4)
def test_any_number_of_ranks_is_equal(precision: Precision) -> None:
    rows = list(verify_world(job(), Lanes(4), spreads(precision), here()))
    assert [row.ends for row in rows] == [("1 rank", spread.name) for spread in spreads()[1:]]
    assert [line for row in rows for line in row.lines()] == []
    assert len({row.on.final_loss_hex for row in rows}) == 1 and len({*rows[0].on.losses}) == 3
    assert rows[0].on.grad_norms[-1] > 0


@on_ranks(4)
def test_two_lanes_that_change_places_are_named_by_step_unit_and_parameter() -> None:
    rows = list(verify_world(job(), Lanes(4), spreads(), here(), self_test=True))
    for row in rows:
        assert not row.equal
        (line,) = row.differences["gradients"]
        assert line.startswith("step 0, blocks.0.") and "elements, the first [" in line
        assert row.differences["losses"], "microbatches have changed places, and so have their losses"
