"""Cost of lanes, the one order of gradients on any number of ranks, beside the order of NCCL (on CPUs, gloo).

    gradient   one gradient, FP32 on every rank, becomes an FP32 sum on the owner of each shard: by a
               reduce-scatter, or by an all-to-all and one kernel that adds the rows in order
    step       M microbatches and AdamW of a Llama with FP8 layers and FP8 weights, ZeRO-2, with
               `lanes` = ranks and without

Both sides take turns in one run, and each figure is the slowest rank's.  A ratio is the median over the
rounds of the quotients of neighbours; its range is printed beside it.  The sum is compared with plain
additions in the order of lanes, bit for bit, and the bytes that the ledger counts with the formula
(N - 1) / N of the gradient.

Next: `lib/lanes_measured.py` measures; `world_size.py` compares bits.
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
from lib.lanes_measured import Job, Row, measure_all
from lib.reducing import WIRES, ratios
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks


def summary(row: Row) -> dict[str, Any]:
    """One row with derived figures."""
    return {
        **asdict(row),
        "median_ms": statistics.median(row.ms),
        "median_lanes_ms": statistics.median(row.lanes_ms),
        **ratios(row.ms, row.lanes_ms),
    }


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True)
    table.add_column("sent in")
    for column in ("without,\nms", "with lanes,\nms", "with / without,\nfrom ... to", "MiB sent\na rank"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        table.add_row(
            row["case"],
            row["wire"],
            f"{row['median_ms']:.3f}",
            f"{row['median_lanes_ms']:.3f}",
            f"[bold]{row['ratio']:.3f}[/], {row['least_ratio']:.3f} ... {row['greatest_ratio']:.3f}",
            f"{row['bytes'] / 2**20:,.0f}",
        )
    console.print(table)


def _title(payload: dict[str, Any]) -> str:
    return f"Gradients in the order of lanes, {payload['ranks']} ranks on {payload['environment']['name']}"


COLORS = dict(zip(WIRES, ("#4e79a7", "#f28e2b"), strict=True))


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws the ratio of each case with its range."""
    rows = payload["rows"][::-1]
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for y, row in enumerate(rows):
        color = COLORS[row["wire"]]
        axis.plot([row["least_ratio"], row["greatest_ratio"]], [y, y], color=color, linewidth=2)
        axis.plot(row["ratio"], y, "o", color=color)
    axis.axvline(1, color="#888888", linestyle="--")
    axis.set_yticks(range(len(rows)), [f"{row['case']}, {row['wire']}" for row in rows])
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("time with lanes / time without: median and range over the rounds")
    axis.set_title(_title(payload), loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Time of reductions and of steps with lanes, relative to those in the order of NCCL.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/lanes.py --shape 8b --layers 8

    torchrun --nproc-per-node 2 benchmarks/lanes.py --shape 70b-l2-s1k --microbatches 1 --replay --json

    python benchmarks/lanes.py --device cpu --ranks 2 --shape tiny --size 1 --replay""",
)
def main(
    size: Annotated[
        list[int] | None, typer.Option(help="MiB of a gradient; repeat for several.", show_default="200 2048")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Key of `SHAPES`; repeat for several.", show_default="70b-l2-s1k")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the shape's.")] = None,
    microbatches: Annotated[
        list[int] | None, typer.Option(help="Of a rank, in a step; repeat for several.", show_default="1 8")
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Microbatches as CUDA graphs.")] = False,
    rounds: options.Rounds = 8,
    steps: options.Steps = 3,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    launch = launch_of(ranks, device)
    if launch.world < 2:
        raise typer.BadParameter("one rank has nobody to send gradients to; start at least 2")
    shapes, counts = tuple(shape or ("70b-l2-s1k",)), tuple(microbatches or (1, 8))
    sizes = tuple(mib << 20 for mib in size or (200, 2048))
    rows = run_on_ranks(measure_all, Job(sizes, shapes, layers, counts, replay, rounds, steps), launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "rounds": rounds,
            "rows": [summary(row) for row in rows],
        }
        name = f"lanes-{'-'.join(shapes)}-{launch.world}" + ("-replay" if replay else "")
        publish(payload, out, name, draw=partial(draw, payload), show=partial(show, payload), as_json=as_json)


if __name__ == "__main__":
    app()
