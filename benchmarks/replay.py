"""Host time of a replayed microbatch by the depth of the model, beside an eager one.

A Hugging Face Llama of hidden size 2048 (`hf.py`'s `1b` with other depths), fused, in bf16 and in FP8, runs
steps of four microbatches, eager and then as CUDA graphs (`flatfsdp.replayed`).  Before each microbatch the
GPU is idle, so that the host never waits for it.  The time of a replayed one is our own Python and the
driver's launch of the graph, which grows with the graph's nodes: kernels, copies, collectives.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.hf_engines import LABELS, Engine
from lib.replay_measured import Job, measure_all
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks

COLORS = {Engine.flat_fused_replay: "#1b3a5c", Engine.flat_fused_fp8_replay: "#2d5a27"}
MARKERS = {"first": "<", "middle": "o", "last": ">"}


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    table.add_column("layers", justify="right")
    table.add_column("place")
    for column in ("nodes", "eager\nms", "replayed\nms", "of that\nlaunch, ms", "us a\nnode"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        table.add_row(
            LABELS[Engine(row["engine"])],
            str(row["layers"]),
            row["place"],
            f"{row['nodes']:,}",
            f"{row['eager_us'] / 1e3:.2f}",
            f"[bold]{row['replay_us'] / 1e3:.3f}[/]",
            f"{row['launch_us'] / 1e3:.3f}",
            f"{row['replay_us'] / row['nodes']:.2f}",
        )
    console.print(table)


def _title(payload: dict[str, Any]) -> str:
    zero = "ZeRO-3" if payload["job"]["reshard"] else "ZeRO-2"
    return f"Time of the host for one microbatch, {payload['ranks']} ranks, {zero}"


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws milliseconds by nodes: the total, and the launch alone."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for engine, color in COLORS.items():
        for place, marker in MARKERS.items():
            rows = [row for row in payload["rows"] if (row["engine"], row["place"]) == (engine, place)]
            nodes = [row["nodes"] for row in rows]
            label = f"{LABELS[engine]}, {place}"
            axis.plot(
                nodes, [row["replay_us"] / 1e3 for row in rows], color=color, marker=marker, label=label
            )
            launches = [row["launch_us"] / 1e3 for row in rows]
            axis.plot(nodes, launches, color=color, marker=marker, linestyle=":", alpha=0.5)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("nodes of the graph")
    axis.set_ylabel("ms; dotted: the launch alone")
    axis.set_title(_title(payload), loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Time of the host for a replayed microbatch, and how much of it the driver's launch takes.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/replay.py

    torchrun --nproc-per-node 2 benchmarks/replay.py --layers 2 --keep --json""",
)
def main(
    layers: Annotated[
        list[int] | None, typer.Option(help="Repeat for several.", show_default="2 8 32")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Of a microbatch.")] = 512,
    reshard: options.Reshard = True,
    steps: options.Steps = 10,
    ranks: options.RanksToStart = 1,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    launch = launch_of(ranks, Device.auto)
    if not launch.use_cuda():
        raise typer.BadParameter("there is no CUDA device here, and microbatches are replayed on those alone")
    job = Job(tuple(layers or (2, 8, 32)), tokens, reshard, steps)
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda"),
            "ranks": launch.world,
            "job": asdict(job),
            "rows": [asdict(row) for row in rows],
        }
        publish(
            payload,
            out,
            f"replay-{launch.world}-{'reshard' if reshard else 'keep'}",
            draw=partial(draw, payload),
            show=partial(show, payload),
            as_json=as_json,
        )


if __name__ == "__main__":
    app()
