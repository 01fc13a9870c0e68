"""Cost of `grad_sync="every"`, which keeps no whole gradient on any rank, beside "last".

A Llama with FP8 layers and FP8 weights runs steps of M microbatches and AdamW.  "last" adds up gradients over
the microbatches, 4 bytes a parameter on every rank, and sends them once a step; "every" sends them M times
and adds up 1/N of them.  Both take turns in one run, eagerly on one model that is switched.  A ratio is the
median over the rounds of the quotients of neighbours; its range is printed beside it.  The bytes that the
ledger counts are compared with the formula.

Next: `lib/grad_sync_measured.py` measures.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.grad_sync_measured import Job, Row, measure_all
from lib.reducing import ratios
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks


def summary(row: Row) -> dict[str, Any]:
    """One row with derived figures."""
    return {
        **asdict(row),
        "median_last_ms": statistics.median(row.last_ms),
        "median_every_ms": statistics.median(row.every_ms),
        **ratios(row.last_ms, row.every_ms),
    }


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("sent in")
    for column in (
        '"last",\nms',
        '"every",\nms',
        "every / last,\nfrom ... to",
        '"last",\nGiB',
        '"every",\nGiB',
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        table.add_row(
            row["wire"],
            f"{row['median_last_ms']:.1f}",
            f"{row['median_every_ms']:.1f}",
            f"[bold]{row['ratio']:.3f}[/], {row['least_ratio']:.3f} ... {row['greatest_ratio']:.3f}",
            f"{row['last_peak_gib']:.2f}",
            f"{row['every_peak_gib']:.2f}",
        )
    console.print(table)
    console.print(f"The whole gradient: {payload['rows'][0]['gradient_gib']:.2f} GiB.", highlight=False)


def _title(payload: dict[str, Any]) -> str:
    job = payload["job"]
    layers = "" if job["layers"] is None else f", {job['layers']} layers"
    zero, replayed = "ZeRO-3" if job["reshard"] else "ZeRO-2", ", replayed" if job["replays"] else ""
    where = f"{payload['ranks']} x {payload['environment']['name']}"
    return f"{job['shape']}{layers}, M = {job['microbatches']}, {zero}{replayed}, {where}"


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws times and peaks of both ways."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axis, kind, unit in zip(
        figure.subplots(1, 2), ("ms", "peak_gib"), ("ms a step", "peak, GiB"), strict=True
    ):
        bars = [(f'"{way}", {row["wire"]}', row, way) for row in payload["rows"] for way in ("last", "every")]
        heights = [
            row[f"median_{way}_ms"] if kind == "ms" else row[f"{way}_peak_gib"] for _, row, way in bars
        ]
        colors = ["#888888" if way == "last" else "#4e79a7" for *_, way in bars]
        axis.bar([label for label, *_ in bars], heights, color=colors)
        axis.tick_params(axis="x", labelrotation=30)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(unit, loc="left", fontsize=10)
    figure.suptitle(_title(payload), fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help='Time and memory of steps with grad_sync="every", relative to "last".',
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/grad_sync.py --shape 8b --microbatches 16

    torchrun --nproc-per-node 2 benchmarks/grad_sync.py --shape 70b-l2-s1k --replay --json

    python benchmarks/grad_sync.py --device cpu --ranks 2 --shape tiny --microbatches 3""",
)
def main(
    shape: Annotated[str, typer.Option(help="Key of `SHAPES`.")] = "8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the shape's.")] = None,
    microbatches: Annotated[int, typer.Option(min=2, help="Of a rank, in a step.")] = 16,
    reshard: options.Reshard = True,
    replay: Annotated[bool, typer.Option("--replay", help="Microbatches as CUDA graphs.")] = False,
    rounds: options.Rounds = 3,
    steps: options.Steps = 1,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    launch = launch_of(ranks, device)
    if launch.world < 2:
        raise typer.BadParameter("one rank has nobody to send gradients to; start at least 2")
    job = Job(shape, layers, microbatches, reshard, replay, rounds, steps)
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": asdict(job),
            "rows": [summary(row) for row in rows],
        }
        name = f"grad-sync-{shape}-m{microbatches}-{launch.world}" + ("-replay" if replay else "")
        publish(payload, out, name, draw=partial(draw, payload), show=partial(show, payload), as_json=as_json)


if __name__ == "__main__":
    app()
