"""Process groups in fairscale's interface: their names, and the meshes that the engine takes."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.ranks import Ranks


class ProcessGroupName(str, Enum):
    """Values of `process_group_reduce_scatter`."""

    default = "default"
    """Reduce over the group that all-gathers: nothing overlaps."""
    reduce_scatter = "reduce_scatter"
    """Reduce over a separate communicator, as the engine always does."""


def check_reduce_scatter_group(group: Any) -> None:
    """Raises TypeError unless `group` is a ProcessGroupName, a process group, or a stand-in with a rank()."""
    is_name = isinstance(group, str) and group in [name.value for name in ProcessGroupName]
    if not is_name and not isinstance(group, dist.ProcessGroup) and not hasattr(group, "rank"):
        raise TypeError(
            f"process_group_reduce_scatter is {group!r}; pass a ProcessGroupName or a process group"
        )


def mesh_of(group: dist.ProcessGroup | None, *, shard: bool) -> DeviceMesh | None:
    """Makes a mesh of a process group: (N,), or (N, 1) without sharding; None for None."""
    if group is None:
        return None
    device_type = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    if shard:
        return DeviceMesh.from_group(group, device_type)
    alone = Ranks.among((dist.get_rank(),)).group
    assert alone is not None
    ranks = torch.tensor(dist.get_process_group_ranks(group)).unsqueeze(1)
    return DeviceMesh.from_group([group, alone], device_type, ranks, mesh_dim_names=("replicate", "shard"))
