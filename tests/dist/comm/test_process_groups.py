"""Process groups end when they are destroyed, even if a model or a layer that used them is alive."""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import auto_wrap, by_class, shard
from flatfsdp.comm.checking.identity import Action, Difference, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import HostJournal, _journal_of, declare
from flatfsdp.comm.ranks import Ranks
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.engine.whole.units import units_in
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from flatfsdp.parallel import make_mesh
from flatfsdp.torch_private import timeout_of
from tests.support.assertions import assert_raises
from tests.support.models import Block, Net
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_process_group_ends_when_it_is_destroyed_though_a_model_has_it(rank: int, world_size: int) -> None:
    """Gloo's threads may abort the process if they outlive the interpreter."""
    for is_compat in (False, True):
        group = dist.new_group(range(world_size))
        gone = weakref.ref(group)
        layer = Linear(32, 32)
        if is_compat:
            model: Any = FullyShardedDataParallel(layer, process_group=group)
        else:
            model = shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
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
    model = shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group(group)
    del group
    assert model.clip_grad_norm_(1.0) > 1.0


@on_ranks(2)
def test_groups_that_are_made_and_destroyed_leave_nothing_behind(world_size: int) -> None:
    """A model has a second communicator beside each of its groups, which its user does not know."""

    def threads_and_files() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    seen = []
    for _ in range(20):
        group = dist.new_group(range(world_size))
        model = shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(group, "cpu"))
        model(torch.ones(2, 2)).sum().backward()
        second = weakref.ref(Ranks.of(group).own_communicator().group)
        dist.destroy_process_group(group)
        # Destroyed with the first one, not when that is forgotten, which ranks do at different times.
        assert len(dist.distributed_c10d._world.pg_map) == 1
        assert second() is None
        del group
        seen.append(threads_and_files())
    assert len(set(seen[5:])) == 1


@on_ranks(4)
def test_ranks_that_are_in_unequally_many_groups(rank: int, world_size: int) -> None:
    """Ranks that named a new group by the number of groups they are in would wait for each other in vain."""
    pair = dist.new_group([0, 1])
    model = shard(nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert Ranks.among(tuple(range(world_size))).size == world_size
    if rank < 2:
        dist.destroy_process_group(pair)


@on_ranks(2)
def test_the_second_communicator_waits_as_long_as_the_first(world_size: int) -> None:
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=17))
    second = Ranks.of(group).own_communicator().group
    assert second is not None
    assert timeout_of(second) == timedelta(seconds=17)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_the_engine_waits_no_longer_than_the_process_group(rank: int, world_size: int) -> None:
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=1))
    model = shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(group, "cpu"), timeout=600.0)
    model(torch.ones(2, 2)).sum().backward()
    if rank == 1:
        time.sleep(3.0)
        return
    with pytest.raises(RuntimeError, match="rank 1 did not come within 1 s: rank 0 gathers"):
        model(torch.ones(2, 2))


@on_ranks(3)
def test_ranks_find_each_other_after_one_has_warned_the_others(rank: int) -> None:
    ranks, device = Ranks.of(dist.group.WORLD), torch.device("cpu")
    build = Identity(Action.BUILD, ModelIdentity(timeout=1.0), is_early=False)
    declare(ranks, build, device)
    if rank == 0:
        journal = _journal_of(ranks, device)
        assert isinstance(journal, HostJournal)
        journal.warn(Difference(0, build.number, 3, Identity(Action.NORM).number))
    else:
        with pytest.raises(RuntimeError, match="rank 0 compares what it has built, while rank 3 takes"):
            declare(ranks, build, device)
    if rank == 2:
        time.sleep(3.0)
        return
    with pytest.raises(RuntimeError, match=r"^rank 2 did not come within 1 s: rank 0 .*, as does rank 1\."):
        declare(ranks, build, device)


# ---- groups of a mesh have the right members -------------------------------------------------------------


@on_ranks(4)
def test_each_group_sums_over_its_ranks(rank: int) -> None:
    """Sums of 10 ^ rank over the ranks of each group."""
    mesh = make_mesh(pp=2, tp=2)
    found = []
    for group in (mesh.tp_group, mesh.dp_group, mesh.pp_group, mesh.stage_group, mesh.dp.get_group()):
        total = torch.tensor(10.0**rank)
        dist.all_reduce(total, group=group)
        found.append(total.item())
    expected = [
        [11.0, 1.0, 101.0, 11.0, 1.0],
        [11.0, 10.0, 1010.0, 11.0, 10.0],
        [1100.0, 100.0, 101.0, 1100.0, 100.0],
        [1100.0, 1000.0, 1010.0, 1100.0, 1000.0],
    ]
    assert found == expected[rank]


@on_ranks(4)
def test_shard_groups_are_neighbours_and_models_share_them(rank: int) -> None:
    models = [wrap(Net(), by_class(Block), dp_shard=2) for wrap in (shard, auto_wrap)]
    grids = [unit.fsdp_state.grid for model in models for _, unit in units_in(model)]
    assert len(grids) > 4
    assert grids[0].shard.global_ranks == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
    assert grids[0].replicate.global_ranks == [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
    assert all(grid == grids[0] for grid in grids)
    whole, replicas = (shard(nn.Linear(2, 2), dp_shard=size).fsdp_state.grid for size in (4, 1))
    assert (whole.shard.size, whole.replicate.size) == (4, 1)
    assert (replicas.shard.size, replicas.replicate.size) == (1, 4)


@on_ranks(4)
def test_shard_groups_that_cannot_be(rank: int) -> None:
    for dp_shard, message in (
        (3, "dp_shard is 3; it has to divide the number of ranks, 4"),
        (-1, "dp_shard is -1; it must be the number of ranks that share parameters"),
        (True, "dp_shard is True; it must be"),
    ):
        assert_raises(ValueError, message, shard, nn.Linear(2, 2), dp_shard=dp_shard)
    mesh = make_mesh(dp_replicate=2)
    for name, other in (("mesh", mesh.dp), ("tp_group", mesh.tp_group)):
        message = f"dp_shard arranges all ranks, and there is {name}, too"
        assert_raises(ValueError, message, shard, nn.Linear(2, 2), dp_shard=2, **{name: other})
    message = r"rank 0 has \[dp_shard=2\] where rank 1 has \[dp_shard=4\]"
    assert_raises(RuntimeError, message, shard, nn.Linear(2, 2), dp_shard=2 if rank != 1 else 4)
