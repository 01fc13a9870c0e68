"""Groups of a mesh have the right members."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import auto_wrap, by_class, shard
from flatfsdp.engine.whole.units import units_in
from flatfsdp.parallel import make_mesh
from tests.support.assertions import assert_raises
from tests.support.models import Block, Net
from tests.support.ranks import on_ranks


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
