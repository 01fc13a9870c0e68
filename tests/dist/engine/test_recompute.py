"""Activation checkpointing changes nothing, bit for bit, inside a unit, around it, and around some uses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import by_class, shard
from tests.support.models import (
    Block,
    Net,
    RecomputedNet,
    each_policy,
    grads_of,
    plain_net,
    same,
    same_trace,
    train,
)
from tests.support.ranks import on_ranks


@each_policy
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("around", [False, True], ids=["inside the unit", "around the unit"])
@on_ranks(2)
def test_recomputation_changes_nothing(rank: int, around: bool, reentrant: bool, policy: Any) -> None:
    nets = (plain_net(net) for net in (Net, partial(RecomputedNet, reentrant, around)))
    result = same_trace(*(train(shard(net, by_class(Block), **policy), rank) for net in nets))
    assert all(result.values()), result


class InsideAndOutside(nn.Module):
    """One layer, used plainly and inside a reentrant checkpoint, in either order."""

    def __init__(self, recompute: tuple[bool, bool]) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for recompute in self.recompute:
            x = (checkpoint(self.layer, x, use_reentrant=True) if recompute else self.layer(x)).tanh()
        return self.head(x).sum()


@pytest.mark.parametrize("recompute", [(False, True), (True, False), (True, True)])
@on_ranks(2)
def test_a_layer_inside_and_outside_a_checkpoint_is_reduced_once(rank: int, recompute: Any) -> None:
    grads, reductions = [], []
    for flag in (False, True):
        torch.manual_seed(0)
        model = shard(InsideAndOutside(recompute), optimize_backward_concat=flag)
        torch.manual_seed(rank)
        model(torch.randn(3, 5)).backward()
        grads.append(grads_of(model))
        reductions.append(model.fsdp_state.shared.ledger.calls["reduce"])
    assert same(*grads)
    assert reductions == [1, 1], "what a nested backward brings does not count as the outer one's"
