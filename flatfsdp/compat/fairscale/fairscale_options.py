"""Translates fairscale's constructor arguments into the engine's, and refuses unsupported ones.

In:   arguments of `FullyShardedDataParallel`, and the parameters that it is about to take, by name.
Out:  `Precision`, a device, a mesh, default gradient factors; or an error that names the alternative.
Next: `engine/api/wrapper.py` passes them to `FlatFSDP`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.ranks import Ranks
from flatfsdp.options import Precision


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
        way_out = "pass a ProcessGroupName or a process group"
        raise TypeError(f"process_group_reduce_scatter is {group!r}; {way_out}")


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


def check_supported(flatten_parameters: bool, offload_config: Any, fp8_all_gather: bool) -> None:
    """Raises NotImplementedError for features that the engine does not have."""
    offloads = getattr(offload_config, "offload_type", offload_config) is not None
    for what, is_asked in (
        ("flatten_parameters=False is not supported; use flatfsdp.param_groups", not flatten_parameters),
        ("offload_config is not supported; use move_params_to_cpu=True", offloads),
        ("fp8_all_gather is not supported; wrap FP8 layers with flatfsdp.FlatFSDP", fp8_all_gather),
    ):
        if is_asked:
            raise NotImplementedError(what)


def choose_cpu_offload(move_params_to_cpu: bool, cpu_offload: bool, move_grads_to_cpu: bool | None) -> bool:
    """Whether shards and gradients are kept in CPU memory, where the optimizer then runs.

    Raises:
        ValueError: if only one of parameters and gradients would be offloaded.
    """
    offload = move_params_to_cpu or cpu_offload
    if move_grads_to_cpu is not None and move_grads_to_cpu != offload:
        both = f"move_grads_to_cpu={move_grads_to_cpu} with move_params_to_cpu={offload}"
        raise ValueError(f"{both}: an optimizer needs both in one place; leave move_grads_to_cpu out")
    return offload


def choose_precision(
    parameters: Mapping[str, Tensor],
    mixed_precision: bool,
    compute_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
    fp32_reduce_scatter: bool,
) -> Precision:
    """The dtypes of a unit.

        parameters  mixed_precision  fp32_reduce_scatter  shard  compute        accumulate, reduce  gradient
        FP32        False            either               FP32   FP32           FP32                grad
        FP32        True             False                FP32   compute_dtype  compute_dtype       grad
        FP32        True             True                 FP32   compute_dtype  FP32                grad
        bf16        False            False                bf16   bf16           bf16                grad
        bf16        False            True                 bf16   bf16           FP32                main_grad

    compute_dtype defaults to FP16 in mixed precision, else to the parameters' dtype.

    Raises:
        ValueError: if parameters differ in dtype, are not FP32 in mixed precision, or are not in
            compute_dtype without it.
    """
    own = _common_dtype(parameters)
    if mixed_precision:
        if own not in (None, torch.float32):
            raise ValueError(
                f"mixed_precision=True has FP32 shards, but parameter {next(iter(parameters))} is {own}; "
                "pass a module in FP32, or mixed_precision=False"
            )
        param, compute = torch.float32, compute_dtype or torch.float16
    else:
        param = compute = own or compute_dtype or torch.float32
        if compute_dtype not in (None, compute):
            raise ValueError(
                f"parameter {next(iter(parameters))} is {own} and compute_dtype {compute_dtype}; convert it "
                "before, or pass mixed_precision=True for FP32 shards"
            )
    reduce = torch.float32 if fp32_reduce_scatter else compute
    grad, buffer = None if mixed_precision else reduce, buffer_dtype or compute
    return Precision(param, compute, accumulate=reduce, reduce=reduce, grad=grad, buffer=buffer)


def _common_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype | None:
    first: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        raise ValueError(f"{found}; wrap modules of different dtypes by themselves, or convert them first")
    return next(iter(first), None)


def choose_device(
    compute_device: torch.device | str | None,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> torch.device | str | None:
    """The requested device, or None for the parameters'; CUDA for CPU parameters if the group is NCCL's."""
    if compute_device is not None or any(parameter.is_cuda for parameter in parameters.values()):
        return compute_device
    if group is None or not torch.cuda.is_available() or dist.get_backend(group) == dist.Backend.GLOO:
        return None
    return "cuda"


def default_predivide_factor(world_size: int) -> float:
    """About the square root of `world_size`: half of the division comes before the sum over ranks."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def mean_is_the_same(world_size: int, precision: Precision) -> bool:
    """Whether dividing once by `world_size` gives the same bits as dividing by two factors.

    Division by powers of two is exact, except in FP16, whose range is small.
    """
    return world_size == 1 or (world_size.bit_count() == 1 and precision.reduce != torch.float16)
