"""The keyword arguments of `shard` that it hands on to every unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.flat.meta_device import ParamInit
from flatfsdp.policy import GradSync, Precision, Prefetch


class ShardOptions(TypedDict, total=False):
    """Options of `shard`, which `FlatFSDP` explains one by one."""

    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    device: torch.device | str | None
    precision: Precision | None
    cast_inputs: bool
    shard: bool
    reshard_after_forward: bool
    grad_sync: GradSync
    prefetch: Prefetch | None
    cpu_offload: bool
    tp_group: dist.ProcessGroup | None
    param_init_fn: ParamInit | None
    sync_module_states: bool
    check_collectives: bool
    rank_timeout: float
    poison_on_free: bool


def require_known(options: Mapping[str, Any]) -> None:
    """Checks names, before anything has changed.

    Raises:
        TypeError: for an unknown option.
    """
    unknown = next((name for name in options if name not in ShardOptions.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"shard() got an unexpected keyword argument {unknown!r}")
