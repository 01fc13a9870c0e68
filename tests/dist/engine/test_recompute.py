"""Activation checkpointing changes nothing, bit for bit, inside a unit and around it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flatfsdp import FlatFSDP, auto_wrap, by_class
from tests.support.models import Block, Net, same_trace, train
from tests.support.ranks import run_ranks


def with_and_without(
    rank: int, world_size: int, flag: bool, reentrant: bool, around: bool
) -> dict[str, bool]:
    traces = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = Net()
        model = auto_wrap(net, by_class(Block), optimize_backward_concat=flag, poison_on_free=True)
        for block in net.blocks if recompute else ():
            assert isinstance(block, FlatFSDP)
            target = block if around else block.module
            plain = target.forward
            target.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)
        traces.append(train(model, rank))
    return same_trace(*traces)


@pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("around", [False, True], ids=["inside the unit", "around the unit"])
def test_recomputation_changes_nothing(around: bool, reentrant: bool, flag: bool) -> None:
    for result in run_ranks(2, with_and_without, flag, reentrant, around):
        assert all(result.values()), result
