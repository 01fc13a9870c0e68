"""Small gradients of a unit wait for each other, and are added in one launch; the bits are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FlatFSDP, Precision, microbatches
from flatfsdp.engine.storage import main_grad as buffers

WIDTH = 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) @ self.table


def gradient(model: FlatFSDP) -> Tensor:
    (group,) = model.fsdp_state.groups
    (grad,) = group.master.grads
    return grad


def build(small: int, monkeypatch: pytest.MonkeyPatch, compute: torch.dtype = torch.float32) -> FlatFSDP:
    monkeypatch.setattr(buffers, "SMALL", small)
    return FlatFSDP(Net(), precision=Precision(compute=compute))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, WIDTH, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_one_by_one(compute: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for small in (0, WIDTH, WIDTH * WIDTH):
        model = build(small, monkeypatch, compute)
        for _ in range(2):
            for x in microbatches(model, batches(3)):
                model(x).square().mean().backward()
        grads.append(gradient(model))
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_after_a_backward_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(WIDTH, monkeypatch)
    plain = Net()
    with model.no_sync():
        for x in batches(2):
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
    assert torch.equal(model.module.norm.bias.main_grad, plain.norm.bias.grad)


def test_whoever_claims_a_slot_finds_what_waits_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(WIDTH, monkeypatch)
    plain = Net()
    (x,) = batches(1)
    found = []
    # The norm's gradients land last, and the linear bias before them.
    bias = model.module.linear.bias
    model.module.norm.weight.register_hook(lambda _: found.append(bias.get_main_grad().clone()))
    with model.no_sync():
        model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert len(found) == 1 and torch.equal(found[0], plain.linear.bias.grad)
    assert torch.equal(bias.main_grad, plain.linear.bias.grad)
