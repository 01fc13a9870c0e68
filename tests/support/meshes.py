"""Meshes that parametrised tests name before there are ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.compat.fairscale.fairscale_options import mesh_of
from tests.support.ranks import cached_in_file

REPLICATED = {"mesh": "replicated"}
"""Options of a model whose parameters are whole on each rank; `placed` makes the mesh of (N, 1)."""


HYBRID = {"mesh": "hybrid"}
"""Options of a model that is sharded over half of the ranks, and replicated twice."""


def replicating(group: dist.ProcessGroup | None = None) -> DeviceMesh | None:
    """The mesh of (N, 1) of these ranks; default: all of them."""
    return mesh_of(group or dist.group.WORLD, shard=False)


def placed(options: dict[str, Any]) -> dict[str, Any]:
    """The options for `shard`, with a mesh of all ranks for REPLICATED and HYBRID."""
    if options.get("mesh") == "hybrid":
        return {**options, "mesh": _hybrid()}
    return {**options, "mesh": replicating()} if options.get("mesh") == "replicated" else options


@cached_in_file
def _hybrid() -> DeviceMesh:
    return dist.init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
