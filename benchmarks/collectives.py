"""How fast are the three collectives that the engine uses, and how close do they come to the link's limit?

All-reduce, reduce-scatter and all-gather as `flatfsdp.comm` calls them, over NCCL on GPUs or over gloo on
CPUs, on buffers of random numbers.  Before a call is timed, its result is compared with what the ranks'
data must give.  Then a batch of calls in a row is timed after a barrier: between CUDA events on GPUs, by
the wall clock on CPUs.  A time is that of the slowest rank, and the median over the repeats.

With S the bytes of the whole tensor (what all-reduce works on, reduce-scatter reads, all-gather writes),
N ranks and t the time of one call:

    algorithm bandwidth   S / t                        how fast the caller's tensor is dealt with
    bus bandwidth         2 (N - 1) / N * S / t        all-reduce
                              (N - 1) / N * S / t      reduce-scatter, all-gather

The bus bandwidth is what each rank sends, and receives, in a second if the algorithm moves no more than it
must.  So it can be compared between operations and numbers of ranks, and with the limit of the link (which
an all-reduce that the switches add up, NVLink SHARP, may exceed):

    NCCL   what one GPU's NVLink carries in one direction, by its specification; unknown for other GPUs than
           those in `NVLINK`, and for ranks on several hosts
    gloo   the bandwidth of `Tensor.copy_` in one process, measured in the same run

1 GB is 10^9 bytes; 1 MiB is 2^20.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import _options as options
import matplotlib as mpl
import torch
import torch.distributed as dist
import typer
from _common import RESULTS, environment, launch_of, publish
from _device import Clock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from flatfsdp.cli.ranks import Device, Rank, is_main, run_on_ranks
from flatfsdp.comm import Ranks, all_gather, all_reduce, reduce_scatter
from flatfsdp.layout import ELEMENT_ALIGNMENT

KIB, MIB, GIB = 2**10, 2**20, 2**30

NVLINK = {"NVIDIA H100 80GB HBM3": 450.0, "NVIDIA H200": 450.0}
"""GB/s in one direction, 900 in both: NVLink 4 of the Hopper GPUs that have all of its links."""

SMALLEST = 64 * KIB
LARGEST = {"cuda": GIB, "cpu": 64 * MIB}
GROWTH = 4
"""A sweep goes from the smallest size to the largest in steps of this factor."""

MAX_CALLS = 20
BATCH_BYTES = {"cuda": 8 * GIB, "cpu": 64 * MIB}
"""A batch has `MAX_CALLS` calls, or fewer where they would work on more than this."""

COPY_BYTES = 128 * MIB
"""Larger than the caches, so that the memory is measured."""


class Operation(str, Enum):
    all_reduce = "all-reduce"
    reduce_scatter = "reduce-scatter"
    all_gather = "all-gather"


class DtypeName(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


DTYPES = {DtypeName.float32: torch.float32, DtypeName.bfloat16: torch.bfloat16}


def bus_factor(operation: Operation, ranks: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth."""
    passes = 2 if operation is Operation.all_reduce else 1
    return passes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Job:
    """What every rank measures.

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
    """What one rank can send at best, in GB/s, and where that figure comes from."""

    gb_s: float
    source: str


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Attributes:
        bytes: of the whole tensor, padded to equal shards.
        calls: in each timed batch.
        ms: of one call, for each batch; the slowest rank's.
    """

    operation: Operation
    bytes: int
    calls: int
    ms: list[float]


@dataclass(frozen=True)
class Report:
    backend: str
    limit: Limit | None
    rows: list[Row]


# -- what happens on the ranks ---------------------------------------------------------------------------


def measure_all(rank: Rank, job: Job) -> Report:
    """On one rank: every operation at every size; all ranks return the same times."""
    limit = link_limit(rank, job)
    rows = []
    with _progress(visible=rank.index == 0) as bar:
        task = bar.add_task("", total=len(job.sizes) * len(Operation))
        for size in job.sizes:
            for operation in Operation:
                bar.update(task, description=f"{operation.value}, {readable(size)}")
                rows.append(_measure(operation, size, job, rank))
                bar.advance(task)
    return Report(str(dist.get_backend()), limit, rows)


def _measure(operation: Operation, size: int, job: Job, rank: Rank) -> Row:
    dtype, multiple = DTYPES[job.dtype], rank.world * ELEMENT_ALIGNMENT
    numel = -(-size // (dtype.itemsize * multiple)) * multiple
    nbytes = numel * dtype.itemsize
    call, result = prepare(operation, numel, dtype, rank)
    call()
    check(result, operation, numel, rank)
    calls = min(MAX_CALLS, max(1, BATCH_BYTES[rank.device.type] // nbytes))
    clock = Clock(rank.device)
    # One batch more than asked for: the first one only warms up.
    for _ in range(1 + job.repeats):
        dist.barrier()
        clock.mark()
        for _ in range(calls):
            call()
        clock.mark()
    batches = clock.gaps()[::2]  # the gaps between are the barriers
    slowest = torch.tensor(batches[1:], dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Row(operation, nbytes, calls, (slowest / calls).tolist())


def prepare(
    operation: Operation, numel: int, dtype: torch.dtype, rank: Rank
) -> tuple[Callable[[], None], Tensor]:
    """The operation over fresh buffers, and the buffer that its result is in after a call.

    All-reduce works in place, and so on its own result from the second call on.  It takes the mean, so that
    the numbers stay as they are; with sums they would grow to infinity.
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
    """Compares a result with the same thing computed by this rank alone: equal, or, for means, close.

    Raises:
        RuntimeError: if it is wrong, naming the operation and the rank.
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
        # N normal numbers, of at most about 6 each, are added up and divided by N: N roundings of 6 at most.
        tolerance = 6 * rank.world * torch.finfo(dtype).eps
    error = float((result - expected).abs().max())
    # A NaN fails, too.
    if not error <= tolerance:
        raise RuntimeError(
            f"{operation.value} of {readable(numel * dtype.itemsize)} of {dtype} gave a wrong result on rank "
            f"{rank.index}: it is off by {error:g}, and rounding explains {tolerance:g}; times of a broken "
            "collective mean nothing, so check the backend's settings and the machine"
        )


def link_limit(rank: Rank, job: Job) -> Limit | None:
    """The limit of the link between the ranks; None where it is not known.  Collective."""
    if rank.device.type == "cuda":
        name = torch.cuda.get_device_name(rank.device)
        if name not in NVLINK or not job.one_host:
            return None
        return Limit(NVLINK[name], "NVLink of one GPU in one direction, specification")
    # One rank alone: together they would share the memory.
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


def _progress(visible: bool) -> Progress:
    """On stderr, so that stdout stays free for JSON."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not visible,
    )


# -- what is shown ---------------------------------------------------------------------------------------


def summary(row: Row, ranks: int, limit: Limit | None) -> dict[str, Any]:
    """One row with what follows from it."""
    ms = statistics.median(row.ms)
    algorithm = row.bytes / ms / 1e6
    bus = algorithm * bus_factor(row.operation, ranks)
    return {
        "operation": row.operation.value,
        "bytes": row.bytes,
        "ms": ms,
        "algorithm_gb_s": algorithm,
        "bus_gb_s": bus,
        "share_of_limit": None if limit is None else bus / limit.gb_s,
        "calls": row.calls,
        "ms_of_each_batch": row.ms,
    }


def readable(nbytes: float) -> str:
    """Such as 64 KiB; four digits at most."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("operation", no_wrap=True)
    for column in ("size", "ms\na call", "algorithm\nGB/s", "bus\nGB/s", "share of\nthe limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for operation in Operation:
        rows = [row for row in payload["rows"] if row["operation"] == operation]
        for row in rows:
            share = row["share_of_limit"]
            table.add_row(
                operation.value if row is rows[0] else "",
                readable(row["bytes"]),
                f"{row['ms']:.3f}",
                f"{row['algorithm_gb_s']:.2f}",
                f"[bold]{row['bus_gb_s']:.2f}[/]",
                "-" if share is None else f"{share:.1%}",
                end_section=row is rows[-1],
            )
    console.print(table)
    limit = payload["limit"]
    known = "not known for this machine" if limit is None else f"{limit['gb_s']:.1f} GB/s ({limit['source']})"
    console.print(f"Limit: {known}.", highlight=False)


def _title(payload: dict[str, Any]) -> str:
    return f"Collectives over {payload['backend']}, {payload['ranks']} ranks, {payload['dtype']}"


COLORS = {
    Operation.all_reduce: "#e15759",
    Operation.reduce_scatter: "#4e79a7",
    Operation.all_gather: "#f28e2b",
}


def draw(payload: dict[str, Any], path: Path) -> None:
    """Bus bandwidth by size, one line for each operation, and the limit."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for operation in Operation:
        rows = [row for row in payload["rows"] if row["operation"] == operation]
        sizes, bandwidths = [row["bytes"] for row in rows], [row["bus_gb_s"] for row in rows]
        axis.plot(sizes, bandwidths, marker="o", color=COLORS[operation], label=operation.value)
    limit = payload["limit"]
    if limit is not None:
        label = f"{limit['gb_s']:.3g} GB/s: {limit['source']}"
        axis.axhline(limit["gb_s"], color="#888888", linestyle="--", label=label)
    ticks = sorted({row["bytes"] for row in payload["rows"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [readable(tick) for tick in ticks], minor=False)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("size of the whole tensor")
    axis.set_ylabel("bus bandwidth, GB/s")
    axis.set_title(_title(payload), loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# -- the command -----------------------------------------------------------------------------------------

UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def parse_size(text: str) -> int:
    """The bytes of a size such as 64MiB; raises typer.BadParameter for what is none."""
    match = re.fullmatch(r"([1-9]\d*) ?([A-Za-z]*)", text)
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write a whole number and B, KiB, MiB or GiB: 64MiB")
    return int(match[1]) * UNITS[match[2]]


def sizes_to_measure(one: int | None, smallest: int | None, largest: int | None, device: str) -> list[int]:
    """The one size, or the sweep.

    Raises:
        typer.BadParameter: if both are asked for, or the sweep is empty.
    """
    if one is not None:
        if smallest is not None or largest is not None:
            raise typer.BadParameter("--size is for one size, --from and --to are for a sweep; pass either")
        return [one]
    size = SMALLEST if smallest is None else smallest
    end = max(size, LARGEST[device]) if largest is None else largest
    if size > end:
        raise typer.BadParameter(f"--from is {readable(size)}, above --to, which is {readable(end)}")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= GROWTH
    return sizes


def file_name(report: Report, ranks: int, job: Job) -> str:
    """Without an ending; the plain name is the sweep's in float32."""
    parts = ["collectives", report.backend, str(ranks)]
    if job.dtype is not DtypeName.float32:
        parts.append(job.dtype.value)
    if len(job.sizes) == 1:
        parts.append(readable(job.sizes[0]).replace(" ", ""))
    return "-".join(parts)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Bandwidth of all-reduce, reduce-scatter and all-gather by size, and its share of the link's limit.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/collectives.py

    torchrun --nproc-per-node 4 benchmarks/collectives.py --size 64MiB --dtype bfloat16

    python benchmarks/collectives.py --device cuda --ranks 4 --from 1MiB --to 256MiB

    python benchmarks/collectives.py --device cpu --ranks 2 --size 4MiB --json""",
)
def main(
    size: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="The one size to measure: 64MiB.", show_default=False
        ),
    ] = None,
    smallest: Annotated[
        int | None,
        typer.Option(
            "--from", parser=parse_size, metavar="SIZE", help="Start of a sweep.", show_default="64KiB"
        ),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option(
            "--to", parser=parse_size, metavar="SIZE", help="Its end.", show_default="1GiB; 64MiB on CPUs"
        ),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the tensors.")] = DtypeName.float32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed batches of calls; the median counts.")] = 10,
    device: options.OnDevice = Device.auto,
    ranks: options.Ranks = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    launch = launch_of(ranks, device)
    if launch.world < 2:
        raise typer.BadParameter("one rank has nobody to talk to; start at least 2")
    kind = "cuda" if launch.use_cuda() else "cpu"
    job = Job(
        tuple(sizes_to_measure(size, smallest, largest, kind)),
        dtype,
        repeats,
        launch.world == launch.local_world,
    )
    report = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment(kind),
            "backend": report.backend,
            "ranks": launch.world,
            "dtype": dtype.value,
            "repeats": repeats,
            "limit": None if report.limit is None else asdict(report.limit),
            "rows": [summary(row, launch.world, report.limit) for row in report.rows],
        }
        name = file_name(report, launch.world, job)
        publish(payload, out, name, draw=partial(draw, payload), show=partial(show, payload), as_json=as_json)


if __name__ == "__main__":
    app()
