"""Parameters stay in memory until the last gradient that needs them is there, also with recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Debug, by_class, shard
from tests.support.models import FLAGS, Block, RecomputedNet, data
from tests.support.ranks import on_ranks


class DetachedUse(nn.Module):
    """All gradients of the weight land before the input's gradient, which needs the weight, is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.detach() + torch.ones_like(x) * self.weight


class FrozenBelow(nn.Module):
    """A frozen layer under a trained one, called on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(x)))


class Twice(nn.Module):
    def __init__(self, unit: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.unit = unit
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.unit, y, use_reentrant=True) if self.recompute else self.unit(y)
        return (y * self.unit(self.first(-x))).square().mean()


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("unit", [DetachedUse, FrozenBelow])
@on_ranks(2)
def test_parameters_stay_until_the_gradients_of_the_inputs_are_there(
    unit: Any, recompute: bool, poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=poison)}
    torch.manual_seed(0)
    plain = Twice(unit(), recompute)
    sharded = copy.deepcopy(plain)
    sharded.unit = shard(sharded.unit, **options)
    model = shard(sharded, **options)
    x = torch.randn(4, 8)
    model(x).backward()
    plain(x).backward()
    for each in (model, plain):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


class FrozenBetween(nn.Module):
    """A unit around a unit: its frozen layer is needed after its trained one has landed."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner = shard(nn.Linear(4, 4), **options)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.inner(x))).sum()


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@on_ranks(2)
def test_a_frozen_layer_between_units_stays_for_the_gradient_of_what_it_took(
    poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=poison)}
    torch.manual_seed(0)
    model = shard(FrozenBetween(options), **options)
    model(torch.ones(2, 4)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@FLAGS
@on_ranks(2)
def test_reentrant_recomputation_frees_each_unit_after_its_backward(rank: int, flag: bool) -> None:
    """Units in memory when each block's norm has its gradient, with reentrant recomputation around blocks."""
    model: Any = shard(RecomputedNet(reentrant=True), by_class(Block), optimize_backward_concat=flag)
    seen: list[int] = []
    units = [m.fsdp_state for m in (model, *model.blocks)]

    def count(*_: Any) -> None:
        seen.append(sum(not unit.is_sharded for unit in units))

    for block in model.blocks:
        block.norm.register_full_backward_hook(count)
    for (tokens,) in data(rank, 2, 1):
        seen.clear()
        model(tokens).backward()
    assert seen == [2, 2, 2], "the root and the block itself"
