"""Speed of a program with transformers' Trainer, and with FlatTrainer in its place.

One run trains `LlamaForCausalLM`, built from its configuration, on real text (the standard library's sources,
one byte per token) with every engine, one after the other: the same program, ranks, data, initial values and
AdamW.  The engines are `Trainer` with PyTorch's FSDP2 in bf16, and `FlatTrainer` in bf16, fused, in FP8, and
with microbatches as CUDA graphs.  A step's time is that of the slowest rank.

With `--resume FOLDER` every FlatTrainer is also interrupted in the middle, saves there, and is resumed: its
losses and shards must be bit-equal to those of an uninterrupted run (with full_determinism=True).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.hf_models import SIZES
from lib.trainer_measured import Engine, Job, Trained, measure_all
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks

COLORS = {Engine.fsdp2: "#f28e2b", Engine.flat: "#a0cbe8"}


def row_of(found: Trained, job: Job) -> dict[str, Any]:
    """One row with derived figures, except `times_as_fast`, which `rows_of` adds."""
    ms = statistics.median(found.ms) if found.ms else None
    tokens = None if ms is None else 1e3 * job.microbatches * job.seq / ms
    return {**asdict(found), "label": found.engine.label, "median_ms": ms, "tokens_per_s_per_rank": tokens}


def rows_of(found: list[Trained], job: Job) -> list[dict[str, Any]]:
    """All rows; `times_as_fast` is relative to FSDP2, and None if one of the two was not measured."""
    rows = [row_of(each, job) for each in found]
    peer = next((row["median_ms"] for row in rows if row["engine"] == Engine.fsdp2), None)
    for row in rows:
        ms = row["median_ms"]
        row["times_as_fast"] = None if peer is None or ms is None else peer / ms
    return rows


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 120)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("program", no_wrap=True)
    columns = (
        "ms/step",
        "tokens/s\na rank",
        "times as fast\nas FSDP2",
        "peak\nGiB",
        "first\nloss",
        "last\nloss",
    )
    for column in (*columns, "resumed"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        if row["failed"]:
            table.add_row(row["label"], f"failed: {row['failed']}")
            continue
        ratio, equal = row["times_as_fast"], row["is_resumed_equal"]
        table.add_row(
            row["label"],
            f"{row['median_ms']:.1f}",
            f"[bold]{row['tokens_per_s_per_rank']:,.0f}[/]",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{row['peak_gib']:.1f}",
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            "-" if equal is None else "equal" if equal else "NOT EQUAL",
        )
    console.print(table)


def _title(payload: dict[str, Any]) -> str:
    job = payload["job"]
    return f"LlamaForCausalLM, {job['size']}, {payload['ranks']} ranks, M = {job['microbatches']}, ZeRO-3"


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws tokens per second, one bar for each program."""
    rows = [row for row in payload["rows"] if not row["failed"]][::-1]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    axis = figure.subplots()
    colors = [COLORS.get(Engine(row["engine"]), "#4e79a7") for row in rows]
    bars = axis.barh(
        [row["label"] for row in rows], [row["tokens_per_s_per_rank"] for row in rows], color=colors
    )
    axis.bar_label(bars, [f" {row['tokens_per_s_per_rank']:,.0f}" for row in rows], fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("tokens/s a rank")
    axis.set_title(_title(payload), loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SIZES)}")
    return name


@app.command(
    help="transformers' Trainer with FSDP2 beside FlatTrainer: the same program with one changed line.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/trainer.py

    torchrun --nproc-per-node 2 benchmarks/trainer.py --engines flat --engines flat-fused-fp8 --resume out

    python benchmarks/trainer.py --size tiny --device cpu --ranks 2 --steps 2 --warmup 2""",
)
def main(
    size: Annotated[str, typer.Option(help=", ".join(SIZES), callback=_known_size)] = "1b",
    accumulation: options.Accumulation = 4,
    steps: options.Steps = 40,
    warmup: options.Warmup = 10,
    engines: Annotated[
        list[Engine] | None, typer.Option(help="Repeat for several.", show_default="all")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints: also interrupt and resume each of ours.")
    ] = None,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 1,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    if find_spec("accelerate") is None:
        raise typer.BadParameter("accelerate is not installed")
    launch = launch_of(ranks, device)
    job = Job(size, accumulation, steps, warmup, tuple(engines or Engine), resume)
    found = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": {**asdict(job), "folder": resume is not None},
            "rows": rows_of(found, job),
        }
        publish(
            payload,
            out,
            f"trainer-{size}-m{accumulation}-{launch.world}",
            draw=partial(draw, payload),
            show=partial(show, payload),
            as_json=as_json,
        )
        if any(each.failed or each.is_resumed_equal is False for each in found):
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
