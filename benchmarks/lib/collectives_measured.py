"""Times of collectives over tensors of many sizes, with checks of their results.

In:   a `Job`, on every rank.
Out:  a `Report`, the same on all ranks.
Next: `collectives.py` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.collectives import all_gather, all_reduce, reduce_scatter
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.ranks import Ranks
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT
from lib.common import progress_bar
from lib.device import Clock

KIB, MIB, GIB = 2**10, 2**20, 2**30

NVLINK = {"NVIDIA H100 80GB HBM3": 450.0, "NVIDIA H200": 450.0}
"""GB/s in one direction, 900 in both: NVLink 4 of the Hopper GPUs that have all of its links."""

SMALLEST = 64 * KIB
LARGEST = {"cuda": GIB, "cpu": 64 * MIB}
GROWTH = 4
"""The factor between consecutive sizes of a sweep."""

MAX_CALLS = 20
BATCH_BYTES = {"cuda": 8 * GIB, "cpu": 64 * MIB}
"""A batch has `MAX_CALLS` calls, or fewer if they would work on more than this."""

COPY_BYTES = 128 * MIB
"""Larger than the caches, so that the memory is measured."""


class Operation(str, Enum):
    """The measured collectives."""

    all_reduce = "all-reduce"
    reduce_scatter = "reduce-scatter"
    all_gather = "all-gather"


class DtypeName(str, Enum):
    """The dtypes that can be chosen."""

    float32 = "float32"
    bfloat16 = "bfloat16"


DTYPES = {DtypeName.float32: torch.float32, DtypeName.bfloat16: torch.bfloat16}


def bus_factor(operation: Operation, ranks: int) -> float:
    """The ratio of bus bandwidth to algorithm bandwidth."""
    passes = 2 if operation is Operation.all_reduce else 1
    return passes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        sizes: bytes of the whole tensor, before it is padded to equal shards.
        repeats: timed batches of each operation at each size.
        one_host: whether all ranks are on this machine.
    """

    sizes: tuple[int, ...]
    dtype: DtypeName
    repeats: int
    one_host: bool


@dataclass(frozen=True)
class Limit:
    """The best that one rank can send, in GB/s, and the source of that figure."""

    gb_s: float
    source: str


@dataclass(frozen=True)
class CollectiveTimes:
    """One operation at one size.

    Attributes:
        bytes: size of the whole tensor, padded to equal shards.
        calls: number of calls in each timed batch.
        ms: time of one call, for each batch, on the slowest rank.
    """

    operation: Operation
    bytes: int
    calls: int
    ms: list[float]


@dataclass(frozen=True)
class Report:
    """All times, with the backend and the limit."""

    backend: str
    limit: Limit | None
    rows: list[CollectiveTimes]


# -- what happens on the ranks ---------------------------------------------------------------------------


def measure_all(rank: Rank, job: Job) -> Report:
    """Measures every operation at every size; all ranks return the same times."""
    limit = link_limit(rank, job)
    rows = []
    with progress_bar(visible=rank.index == 0) as bar:
        task = bar.add_task("", total=len(job.sizes) * len(Operation))
        for size in job.sizes:
            for operation in Operation:
                bar.update(task, description=f"{operation.value}, {readable(size)}")
                rows.append(_measure(operation, size, job, rank))
                bar.advance(task)
    return Report(str(dist.get_backend()), limit, rows)


def _measure(operation: Operation, size: int, job: Job, rank: Rank) -> CollectiveTimes:
    dtype, multiple = DTYPES[job.dtype], rank.world * ELEMENT_ALIGNMENT
    numel = -(-size // (dtype.itemsize * multiple)) * multiple
    nbytes = numel * dtype.itemsize
    call, result = prepare(operation, numel, dtype, rank)
    call()
    check(result, operation, numel, rank)
    calls = min(MAX_CALLS, max(1, BATCH_BYTES[rank.device.type] // nbytes))
    clock = Clock(rank.device)
    # One batch more than requested: the first one only warms up.
    for _ in range(1 + job.repeats):
        dist.barrier()
        clock.mark()
        for _ in range(calls):
            call()
        clock.mark()
    batches = clock.gaps()[::2]  # the gaps between are the barriers
    slowest = torch.tensor(batches[1:], dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return CollectiveTimes(operation, nbytes, calls, (slowest / calls).tolist())


def prepare(
    operation: Operation, numel: int, dtype: torch.dtype, rank: Rank
) -> tuple[Callable[[], None], Tensor]:
    """Prepares the operation over fresh buffers; returns it with the buffer of its result.

    All-reduce works in place, and so on its own result from the second call on.  It takes the mean, so that
    the numbers do not grow; with sums they would reach infinity.
    """
    ranks = Ranks.of(dist.group.WORLD)
    if operation is Operation.all_gather:
        shard = payload(rank.index, numel // rank.world, dtype, rank.device)
        full = shard.new_empty(numel)
        return partial(all_gather, full, shard, ranks), full
    full = payload(rank.index, numel, dtype, rank.device)
    if operation is Operation.all_reduce:
        return partial(all_reduce, full, ranks, mean=True), full
    shard = full.new_empty(numel // rank.world)
    return partial(reduce_scatter, shard, full, ranks, mean=True), shard


def payload(index: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The random numbers of rank `index`, which every rank can make; [numel]."""
    generator = torch.Generator(device).manual_seed(index)
    return torch.randn(numel, generator=generator, dtype=dtype, device=device)


def check(result: Tensor, operation: Operation, numel: int, rank: Rank) -> None:
    """Compares a result with the same computation by this rank alone: equal, or, for means, close.

    Raises:
        RuntimeError: if it is wrong; the message names the operation and the rank.
    """
    dtype, device = result.dtype, result.device
    if operation is Operation.all_gather:
        shards = [payload(index, numel // rank.world, dtype, device) for index in range(rank.world)]
        expected, tolerance = torch.cat(shards), 0.0
    else:
        expected = torch.zeros(numel, dtype=torch.float64, device=device)
        for index in range(rank.world):
            expected += payload(index, numel, dtype, device)
        expected /= rank.world
        if operation is Operation.reduce_scatter:
            expected = expected.chunk(rank.world)[rank.index]
        # N normal numbers, of at most about 6 each, are added and divided by N: at most N roundings of 6.
        tolerance = 6 * rank.world * torch.finfo(dtype).eps
    error = float((result - expected).abs().max())
    # Written so that NaN fails.
    if not error <= tolerance:
        raise RuntimeError(
            f"{operation.value} of {readable(numel * dtype.itemsize)} of {dtype} gave a wrong result on rank "
            f"{rank.index}: it is off by {error:g}, and rounding explains {tolerance:g}; times of a broken "
            "collective mean nothing, so check the backend's settings and the machine"
        )


def link_limit(rank: Rank, job: Job) -> Limit | None:
    """The limit of the link between the ranks; None if unknown.  Collective."""
    if rank.device.type == "cuda":
        name = torch.cuda.get_device_name(rank.device)
        if name not in NVLINK or not job.one_host:
            return None
        return Limit(NVLINK[name], "NVLink of one GPU in one direction, specification")
    # Only one rank: together they would share the memory bandwidth.
    measured = [copy_bandwidth() if rank.index == 0 else 0.0]
    dist.broadcast_object_list(measured)
    return Limit(measured[0], "memory copy by one process, measured")


def copy_bandwidth() -> float:
    """GB/s that `copy_` moves from one tensor to another on the CPU; the best of five."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return COPY_BYTES / min(times) / 1e9


def readable(nbytes: float) -> str:
    """Formats a size, such as 64 KiB, with at most four digits."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
