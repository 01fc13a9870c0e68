"""A default device (`torch.set_default_device`) moves nothing that belongs to the host.

The meta device stands for a GPU: tensors there have no contents, so whoever reads one finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flatfsdp import FlatFSDP, Precision, checkpoint
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.kernels.shared.tables import device_table
from flatfsdp.layers import Linear
from flatfsdp.optim import AdamW

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


def build(cpu_offload: bool = False) -> tuple[FlatFSDP, AdamW]:
    layers = nn.Sequential(Linear(32, 64, device=CPU), Linear(64, 32, device=CPU))
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = FlatFSDP(
        layers, device=CPU, precision=precision, cpu_offload=cpu_offload, optimize_backward_concat=False
    )
    return model, AdamW(model.parameters(), lr=1e-2)


def step(model: FlatFSDP, optimizer: AdamW) -> None:
    with autocast(recipe=CurrentScaling()):
        loss = model(torch.randn(16, 32, device=CPU)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_tables_of_kernels_are_made_on_the_host() -> None:
    assert device_table([[1, 2], [3, 4]], CPU).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_training_and_resuming(cpu_offload: bool, tmp_path: Path) -> None:
    model, optimizer = build(cpu_offload)
    step(model, optimizer)
    assert all(value.device == CPU for state in optimizer.state.values() for value in state.values())
    checkpoint.save(tmp_path, model, optimizer)
    other, resumed = build(cpu_offload)
    checkpoint.load(tmp_path, other, resumed)
    for each in (model, optimizer), (other, resumed):
        torch.manual_seed(0)
        step(*each)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
