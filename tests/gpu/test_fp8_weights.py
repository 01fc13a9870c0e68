"""Weights stored in FP8: the collectives that NCCL runs in one step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import Debug, FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import LayerNormMLP
from flatfsdp.optim import AdamW
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.gpu.models import WORLD_SIZES
from tests.support.ranks import on_ranks, run_ranks

pytestmark = NEEDS_GPU

LAYERS, MICROBATCHES, HIDDEN, TOKENS = 3, 2, 256, 128


def build(**options: Any) -> FlatFSDP:
    layers = [
        LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", fuse_wgrad_accumulation=True)
        for _ in range(LAYERS)
    ]
    return auto_wrap(
        nn.Sequential(*layers, nn.Linear(HIDDEN, 48)),
        by_class(LayerNormMLP),
        device="cuda",
        precision=Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling()),
        optimize_backward_concat=True,
        **options,
    )


def step(model: FlatFSDP, optimizer: torch.optim.Optimizer) -> None:
    batches = [torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(MICROBATCHES)]
    for x in microbatches(model, batches):
        with autocast(recipe=CurrentScaling()):
            loss = model(x).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def collectives_of_a_step(rank: int, world_size: int, reshard: bool, checked: bool) -> Counter[str]:
    """NCCL kernels by operation, after two steps of warm-up."""
    model = build(reshard_after_forward=reshard, debug=Debug(check_collectives=checked))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, optimizer)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step(model, optimizer)
        torch.cuda.synchronize()
    operations = ("AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Broadcast", "Reduce_")
    found = Counter[str]()
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("ncclDevKernel"):
            found[next((name for name in operations if name in event.name), event.name)] += 1
    return found


@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_launch_of_nccl_a_unit_and_direction(world_size: int, reshard: bool) -> None:
    """FP8 and bf16 parts share a launch.

    The scales of the whole model take one all-reduce a step, what ranks have used of it another one, and the
    gradient norm one all-gather.
    """
    units = LAYERS + 1
    # The root keeps its own parameters from forward to backward.
    gathers = (2 * LAYERS + 1) * MICROBATCHES if reshard else units
    expected = {"AllGather": gathers + 1, "ReduceScatter": units, "AllReduce": 2}
    for found in run_ranks(world_size, collectives_of_a_step, reshard, False, backend="nccl"):
        assert found == expected
    # Identities travel in the same launches, whose kernels may have the name of either.
    for found in run_ranks(world_size, collectives_of_a_step, reshard, True, backend="nccl"):
        assert found.total() == sum(expected.values()), found


def trained(rank: int, cpu_offload: bool) -> list[Tensor]:
    """The master shards after two steps of SGD, whose arithmetic is the same on both devices."""
    torch.manual_seed(0)
    model = build(cpu_offload=cpu_offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        step(model, optimizer)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(backend="nccl")
def test_cpu_offload_changes_no_bit(rank: int) -> None:
    assert all(map(torch.equal, trained(rank, cpu_offload=False), trained(rank, cpu_offload=True)))
