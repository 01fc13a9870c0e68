"""Ranks that do different things on GPUs: all raise, and none waits forever, not even at exit."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import FlatFSDP, auto_wrap, by_class
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.models import Block, update
from tests.support.ranks import run_ranks, stop_pools

pytestmark = NEEDS_GPU
WIDTH = 20


class Stack(nn.Module):
    """Blocks of equal size in an order that a rank may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Ending(NamedTuple):
    """How a rank's program ended."""

    error: str
    seconds: float


def trained(rank: int, what: str, **options: Any) -> Ending:
    """Two good steps, then rank 1 does `what` once, then three more steps, with each loss checked."""
    torch.manual_seed(0)
    model = auto_wrap(Stack(), by_class(Block), device="cuda", optimize_backward_concat=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    try:
        for step in range(5):
            if step == 2:
                start = time.monotonic()
                if rank == 1:
                    misbehave(model, what)
            x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
            loss = model(x).square().mean()
            loss.backward()
            update(optimizer)
            loss.item()
        model.state_dict()
    except RuntimeError as raised:
        return Ending(str(raised), time.monotonic() - start)
    return Ending("", time.monotonic() - start)


def misbehave(model: FlatFSDP, what: str) -> None:
    if what == "order":
        model.module.order = [3, 2, 1, 0]
    elif what == "skip":
        model.module.order = [1, 2, 3]
    elif what == "evaluation":
        with torch.no_grad():
            model(torch.randn(4, WIDTH, device="cuda"))
    elif what == "state_dict":
        model.state_dict()
    elif what == "clip":
        model.clip_grad_norm_(1.0)


def each_case(
    rank: int, world_size: int, cases: list[str], reshard: bool, is_hybrid: bool
) -> dict[str, Ending]:
    """Runs each case in its own process groups, which it aborts; the default one stays intact."""
    endings = {}
    for what in cases:
        if is_hybrid:
            mesh = dist.init_device_mesh("cuda", (2, world_size // 2))
        else:
            mesh = DeviceMesh.from_group(dist.new_group(list(range(world_size))), "cuda")
        endings[what] = trained(rank, what, reshard_after_forward=reshard, mesh=mesh)
        dist.barrier()
    return endings


def check(endings: dict[str, Ending]) -> None:
    for what, ending in endings.items():
        assert "ranks do not do the same: rank " in ending.error, (what, ending)
        assert ending.seconds < 15, (what, ending)


@pytest.mark.parametrize("what", ["order", "skip", "evaluation", "state_dict", "clip"])
@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
def test_all_ranks_raise(what: str, reshard: bool) -> None:
    for endings in run_ranks(2, each_case, [what], reshard, False, backend="nccl", timeout=40):
        check(endings)


def test_ranks_of_other_rows_raise_too() -> None:
    for endings in run_ranks(4, each_case, ["order", "evaluation"], True, True, backend="nccl"):
        check(endings)


def ends(rank: int, world_size: int) -> tuple[Ending, float]:
    """Runs a case in the default process group, which is destroyed at the end of the program."""
    ending = trained(rank, "order")
    start = time.monotonic()
    dist.destroy_process_group()
    return ending, time.monotonic() - start


def test_no_rank_hangs_at_exit() -> None:
    stop_pools()
    for ending, seconds in run_ranks(2, ends, backend="nccl"):
        check({"order": ending})
        assert seconds < 10
    stop_pools()
