"""Speed of the three collectives that the engine uses, relative to the limit of the link.

All-reduce, reduce-scatter and all-gather are called through `flatfsdp.comm.collectives`, over NCCL on GPUs or
gloo on CPUs, on buffers of random numbers.  Before a call is timed, its result is compared with what the
ranks' data must give. Then a batch of consecutive calls is timed after a barrier: between CUDA events on
GPUs, by the wall clock on CPUs.  A time is that of the slowest rank, and the median over the repeats.

With S the bytes of the whole tensor (what all-reduce works on, reduce-scatter reads, all-gather writes), N
ranks and t the time of one call:

    algorithm bandwidth   S / t                        speed from the caller's view
    bus bandwidth         2 (N - 1) / N * S / t        all-reduce
                              (N - 1) / N * S / t      reduce-scatter, all-gather

The bus bandwidth is what each rank sends, and receives, per second if the algorithm moves as little as
possible.  So it can be compared between operations and numbers of ranks, and with the limit of the link
(which an all-reduce that the switches add up, NVLink SHARP, may exceed):

    NCCL   what one GPU's NVLink carries in one direction, by its specification; unknown for GPUs that are not
    in
           `NVLINK`, and for ranks on several hosts
    gloo   the bandwidth of `Tensor.copy_` in one process, measured in the same run

1 GB is 10^9 bytes; 1 MiB is 2^20.

Next: `lib/collectives_measured.py` measures.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.collectives_measured import (
    GIB,
    GROWTH,
    KIB,
    LARGEST,
    MIB,
    SMALLEST,
    CollectiveTimes,
    DtypeName,
    Job,
    Limit,
    Operation,
    Report,
    bus_factor,
    measure_all,
    readable,
)
from lib.common import RESULTS, environment, launch_of, publish
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks


def summary(row: CollectiveTimes, ranks: int, limit: Limit | None) -> dict[str, Any]:
    """One row with derived figures."""
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
    """Draws bus bandwidth by size, one line for each operation, and the limit."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
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


# -- the command -----------------------------------------------------------------------------------------

UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def parse_size(text: str) -> int:
    """Parses a size such as 64MiB into bytes; raises typer.BadParameter if it is invalid."""
    match = re.fullmatch(r"([1-9]\d*) ?([A-Za-z]*)", text)
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write a whole number and B, KiB, MiB or GiB: 64MiB")
    return int(match[1]) * UNITS[match[2]]


def sizes_to_measure(one: int | None, smallest: int | None, largest: int | None, device: str) -> list[int]:
    """The single size, or the sizes of the sweep.

    Raises:
        typer.BadParameter: if both are requested, or the sweep is empty.
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
    """The name of the files without an ending; the plain name is the sweep's in float32."""
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
    ranks: options.RanksToStart = 2,
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
