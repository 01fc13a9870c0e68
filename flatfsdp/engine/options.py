"""`Options`: the keyword arguments of `shard`, `auto_wrap` and `FlatFSDP`.

In:   what a user passes by name.
Next: `build.py` reads those that say where a unit is; the others are the fields of its `Policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.flat.meta_device import ParamInit
from flatfsdp.policy import Debug, GradSync, Precision, Prefetch


class Options(TypedDict, total=False):
    """Keyword arguments of `shard`, `auto_wrap` and `FlatFSDP`; all have a default.

    Attributes:
        mesh: the data-parallel ranks.  A 1-D mesh shards over its ranks; a 2-D one is (replicate, shard), so
            that a mesh of (N, 1) replicates only: parameters stay whole on every rank, and gradients are
            all-reduced.  Default: shard over all ranks, or this process alone without torch.distributed.
            `DeviceMesh.from_group(group, "cuda")` makes a mesh of a process group.
        tp_group: ranks over which the layers inside are split (tensor parallelism); pass the data-parallel
            ranks, which have the same parts, as mesh.  A parameter that no layer declares as split must have
            the same value and the same gradient on all of tp_group.  `state_dict()` and
            `summon_full_params()` give this rank's parts; `checkpoint.full_state_dict` gives whole tensors.
        device: where shards, buffers and compute live; default: where the module is.  Needed for a module on
            the meta device, whose parameters are made and initialised unit by unit.
        param_init_fn: initialises the tensors that a module on the meta device owns directly; default: its
            `reset_parameters()`.  Seed all ranks alike.
        sync_module_states: copy the first data-parallel rank's parameters and buffers to the others, for
            ranks that were not seeded alike.  Default: False.
        precision: dtypes of parameters, compute, accumulation, reduction and buffers.  By default all are
            FP32, and `compute` is bf16 if most elements of the parameters are.
        cast_inputs: cast FP32 tensors to `precision.compute` where parameters meet them: the first argument
            of a unit inside another, and the arguments of the outermost one's modules that own parameters, if
            the first one is in FP32.  Labels that only the outermost forward reads, other dtypes, and tensors
            in lists, dicts and objects stay what they are.  False casts nothing of this unit's.  Default:
            True.
        reshard_after_forward: True, the default, reshards parameters after each forward and backward
            (ZeRO-3); False does so after the last microbatch's backward (ZeRO-2).
        optimize_backward_concat: True, the default, lets each gradient land in the flat buffer that is
            reduced.  False is the baseline: autograd concatenates all gradients of a unit in every
            microbatch.  The bits are the same.
        grad_sync: "last", the default, reduce-scatters gradients in the last microbatch's backward; "every"
            does so in each microbatch's, which needs no full-size gradient buffer in between and moves M
            times the bytes for M microbatches.  Replicas of a 2-D mesh are reduced in the last backward
            either way.
        prefetch: number of units to gather ahead, in forward and in backward; default: `Prefetch()`, one.
        cpu_offload: keep master shards, their gradients and therefore the optimizer state in CPU memory.
            Default: False.
        timeout: seconds that a rank waits for the others in a gather, reduction or checkpoint of the model
            before it raises and names the missing ranks; 60 by default, and five times as long until the
            first step has ended.  Choose more than a rank ever spends alone, in saving for example;
            `math.inf` leaves it to the timeout of the process group, which also holds for what belongs to no
            unit: set it by `torch.distributed.init_process_group(timeout=...)`.
        debug: checks that find mistakes; default: `Debug()`.
    """

    mesh: DeviceMesh | None
    tp_group: dist.ProcessGroup | None
    device: torch.device | str | None
    param_init_fn: ParamInit | None
    sync_module_states: bool
    precision: Precision | None
    cast_inputs: bool
    reshard_after_forward: bool
    optimize_backward_concat: bool
    grad_sync: GradSync
    prefetch: Prefetch
    cpu_offload: bool
    timeout: float
    debug: Debug


def require_known(function: str, options: Mapping[str, Any]) -> None:
    """Checks names, before anything has changed.

    Args:
        function: name of what the user called, for the message.
        options: keyword arguments.

    Raises:
        TypeError: for an unknown option.
    """
    unknown = next((name for name in options if name not in Options.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
