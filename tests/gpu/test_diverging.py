"""Ranks that do different things on GPUs: all of them raise, none is left waiting, now or at exit."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FlatFSDP, auto_wrap, by_class
from tests.dist.models import Block
from tests.dist.ranks import run_ranks, stop_pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
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


def build(is_hybrid: bool, reshard: bool) -> FlatFSDP:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cuda", (2, 2)) if is_hybrid else None
    options = {"device": "cuda", "reshard_after_forward": reshard, "optimize_backward_concat": True}
    return auto_wrap(Stack(), by_class(Block), mesh=mesh, **options)


class Ending(NamedTuple):
    """How a rank's program ended."""

    error: str
    seconds: float
    seconds_to_destroy: float


def diverge(rank: int, world_size: int, what: str, is_hybrid: bool, reshard: bool) -> Ending:
    """Two good steps, then one rank does `what` once, then three steps more, with a look at each loss."""
    model = build(is_hybrid, reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start, error = time.monotonic(), ""
    try:
        for step in range(5):
            if step == 2:
                start = time.monotonic()
                if rank == 1:
                    misbehave(model, what)
            x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        model.state_dict()
    except RuntimeError as raised:
        error = str(raised)
    seconds, start = time.monotonic() - start, time.monotonic()
    dist.destroy_process_group()
    return Ending(error, seconds, time.monotonic() - start)


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


@pytest.mark.parametrize("what", ["order", "skip", "evaluation", "state_dict", "clip"])
@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
@pytest.mark.parametrize(
    ("ranks", "is_hybrid"),
    [pytest.param(2, False, id="2"), pytest.param(4, True, id="hybrid", marks=NEEDS_FOUR)],
)
def test_all_ranks_raise_and_end(ranks: int, is_hybrid: bool, reshard: bool, what: str) -> None:
    # Each case aborts its process groups.
    stop_pools()
    endings = run_ranks(ranks, diverge, what, is_hybrid, reshard, backend="nccl")
    stop_pools()
    for ending in endings:
        assert "ranks do not do the same: rank 0 " in ending.error, endings
        assert ending.seconds < 25 and ending.seconds_to_destroy < 10, endings
