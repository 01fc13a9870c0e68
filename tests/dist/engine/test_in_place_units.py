"""Units that write their result into their input, return the same tensor, and still count as used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import auto_wrap, by_class
from tests.support.models import each_policy, update
from tests.support.ranks import on_ranks

WIDTH = 8


class Added(nn.Module):
    """A module that adds a function of another input in place, as a diffusion block does with a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x += self.mlp(time)
        return x


class Grown(nn.Module):
    """A module that adds to its input, in place, what it computes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _time: Tensor) -> Tensor:
        return x.add_(self.linear(x.relu()))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x, time)
        return x.square().mean()


@each_policy
@pytest.mark.parametrize("block", [Added, Grown])
@on_ranks(2)
def test_a_unit_that_writes_into_its_input(block: type[nn.Module], policy: Any) -> None:
    torch.manual_seed(0)
    plain = Net(block)
    model = auto_wrap(copy.deepcopy(plain), by_class(Added, Grown), **policy)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        # The same on all ranks, whose mean is then what one process computes.
        x, time = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        loss, expected = model(x, time), plain(x, time)
        loss.backward()
        expected.backward()
        update(ours, theirs)
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.fsdp_state.shared.ledger.calls["reduce"] == 3 * 4
