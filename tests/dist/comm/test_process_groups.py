"""Process groups end when they are destroyed, whoever still has a model or a layer that used them."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn

from flatfsdp import FlatFSDP
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_process_group_ends_when_it_is_destroyed_though_a_model_has_it(rank: int, world_size: int) -> None:
    """Gloo's threads may abort the process if they outlive the interpreter."""
    for wrap in (FlatFSDP, FullyShardedDataParallel):
        group = dist.new_group(range(world_size))
        gone = weakref.ref(group)
        model = wrap(Linear(32, 32), process_group=group)
        with autocast(amax_reduction_group=group):
            model(torch.ones(32, 32)).sum().backward()
        model.state_dict()
        dist.destroy_process_group(group)
        del group
        assert gone() is None
        for use, argument in ((model, torch.ones(32, 32)), (model.clip_grad_norm_, 1.0)):
            with pytest.raises(RuntimeError, match="the process group of a model or layer is gone"):
                use(argument)
    # The engine imports this before a group is there, so that it cannot keep one as default argument.
    assert dist.group.WORLD not in differentiable.all_reduce.__defaults__
    # One rank needs no group.
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    model = FlatFSDP(nn.Linear(2, 2), process_group=group)
    model(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group(group)
    del group
    assert model.clip_grad_norm_(1.0) > 1.0
