"""Meshes that parametrised tests name before there are ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.compat.fairscale.fairscale_options import mesh_of

REPLICATED = {"mesh": "replicated"}
"""Options of a model whose parameters are whole on each rank; `placed` makes the mesh of (N, 1)."""


def replicating(group: dist.ProcessGroup | None = None) -> DeviceMesh | None:
    """The mesh of (N, 1) of these ranks; default: all of them."""
    return mesh_of(group or dist.group.WORLD, shard=False)


def placed(options: dict[str, Any]) -> dict[str, Any]:
    """The options for `shard`, with a mesh of all ranks for REPLICATED."""
    return {**options, "mesh": replicating()} if options.get("mesh") == "replicated" else options
