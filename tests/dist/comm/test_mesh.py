"""Groups of a mesh have the right members."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flatfsdp.parallel import make_mesh
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
