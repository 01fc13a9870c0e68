"""How long does a training step take with FlatFSDP, with PyTorch's FSDP2 and with fairscale's FSDP?

One run measures all engines, one after the other, on the same ranks with the same data, the same model seed
and the same optimizer: forward and backward of M microbatches, one sequence each, then AdamW.  Every engine
computes in bf16 and keeps FP32 masters; gradients are reduced in FP32, in the last microbatch's backward.
FlatFSDP and FSDP2 also accumulate in FP32; fairscale 0.4.13 accumulates in bf16, which moves fewer bytes.

Between engines everything is freed.  The first one is measured once more at the end: if its two figures
differ, the machine drifted by that much, and smaller differences between engines mean nothing.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from _common import RESULTS, environment
from _engines import Engine, Variant
from _llama import SHAPES, flops_per_token
from _measuring import Job, Row, measure_all
from rich.console import Console
from rich.table import Table

from flatfsdp.cli.ranks import Device, Launch, is_main, run_on_ranks, under_torchrun


def summary(row: Row, rows: list[Row], job: Job) -> dict[str, Any]:
    """One row with what follows from it; times None if it has no run.

    `time_vs_fsdp2` is relative to FSDP2 in the same mode, eager or compiled; below 1 is faster.
    """
    ms, per_second, vs_fsdp2 = row.ms, None, None
    if ms is not None:
        per_second = 1e3 * job.microbatches * job.config.seq / ms
        peer = [r.ms for r in rows if r.variant == Variant(Engine.fsdp2, row.variant.compiled)]
        vs_fsdp2 = ms / peer[0] if peer and peer[0] is not None else None
    return {
        "name": row.variant.name,
        "label": row.variant.label,
        "skipped": row.skipped,
        "failed": row.failed,
        "ms": ms,
        "tokens_per_s_per_rank": per_second,
        "tflops_per_rank": None if per_second is None else per_second * flops_per_token(job.config) / 1e12,
        "peak_gib": max((run.peak_gib for run in row.runs), default=None),
        "time_vs_fsdp2": vs_fsdp2,
        "runs": [{"median_ms": statistics.median(run.ms), **asdict(run)} for run in row.runs],
    }


def flag_changes_nothing(rows: list[Row]) -> dict[str, bool]:
    """Whether FlatFSDP's losses are the same in every step with the flag off and on, for each mode."""
    losses = {row.variant: row.runs[0].losses for row in rows if row.runs}
    found = {}
    for compiled, mode in ((False, "eager"), (True, "compile")):
        off, on = (losses.get(Variant(engine, compiled)) for engine in (Engine.flat_off, Engine.flat_on))
        if off is not None and on is not None:
            found[mode] = off == on
    return found


def show(payload: dict[str, Any], job: Job, ranks: int) -> None:
    console = Console()
    console.width = max(console.width, 120)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(job, ranks)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    for column in ("ms/step", "tokens/s\nper rank", "TFLOP/s\nper rank", "peak\nGiB", "time vs\nFSDP2"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("first\nloss", "last\nloss", "ms/step\nof each run"):
        table.add_column(column, justify="right", style="cyan", no_wrap=True)
    for row in payload["rows"]:
        if not row["runs"]:
            table.add_row(row["label"], "[red]failed[/]" if row["failed"] else "skipped")
            continue
        losses = row["runs"][0]["losses"]
        table.add_row(
            row["label"],
            f"[bold]{row['ms']:.1f}[/]",
            f"{row['tokens_per_s_per_rank']:,.0f}",
            f"{row['tflops_per_rank']:.1f}",
            f"{row['peak_gib']:.1f}",
            "-" if row["time_vs_fsdp2"] is None else f"{row['time_vs_fsdp2']:.3f}",
            f"{losses[0]:.5f}",
            f"{losses[-1]:.5f}",
            " / ".join(f"{run['median_ms']:.1f}" for run in row["runs"]),
        )
    console.print(table)
    for row in payload["rows"]:
        if row["failed"]:
            console.print(f"{row['label']} failed: {row['failed']}", style="red", markup=False)
        elif row["skipped"]:
            console.print(f"{row['label']}: skipped, {row['skipped']}", markup=False)
    leftovers = [run["leftover_gib"] for row in payload["rows"] for run in row["runs"]]
    if leftovers and max(leftovers) - min(leftovers) > 0.5:
        console.print(
            f"[red]Up to {max(leftovers) - min(leftovers):.1f} GiB of earlier runs were not freed.[/]"
        )
    for mode, same in payload["flag_changes_nothing"].items():
        answer = "the same in every step" if same else "not the same (attention's backward need not repeat)"
        console.print(f"FlatFSDP, {mode}: losses with the flag off and on are {answer}.")


def _title(job: Job, ranks: int) -> str:
    zero = "freed after use (ZeRO-3)" if job.reshard else "kept for a step (ZeRO-2)"
    return f"Training step of {job.shape}, {ranks} ranks, M = {job.microbatches}, parameters {zero}"


COLORS = {
    Engine.flat_off: "#76b7b2",
    Engine.flat_on: "#4e79a7",
    Engine.fsdp2: "#f28e2b",
    Engine.fairscale: "#bab0ac",
}


def draw(payload: dict[str, Any], job: Job, ranks: int, path: Path) -> None:
    """One bar for each variant that ran: milliseconds a step."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in payload["rows"] if row["runs"]]
    colors = {variant.label: COLORS[variant.engine] for variant in job.variants}
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    for row in rows:
        axis.barh(row["label"], row["ms"], color=colors[row["label"]], height=0.7)
        ratio = "" if row["time_vs_fsdp2"] is None else f", {row['time_vs_fsdp2']:.3f} of FSDP2"
        note = f" {row['ms']:.1f} ms, {row['tflops_per_rank']:.0f} TFLOP/s{ratio}"
        axis.text(row["ms"], row["label"], note, va="center", fontsize=9)
    axis.set_xlim(right=1.5 * max((row["ms"] for row in rows), default=1.0))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("ms per step, forward, backward and AdamW (median)")
    axis.set_title(_title(job, ranks), loc="left", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


@app.command(
    help="Training step of FlatFSDP beside FSDP2 and fairscale: same ranks, data, model and optimizer.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 70b-l2 --microbatches 16 --keep

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --compile

    torchrun --nproc-per-node 4 benchmarks/step.py --engines flat-on --engines fsdp2 --rounds 3 --json

    python benchmarks/step.py --shape tiny --device cpu --ranks 2""",
)
def main(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES), callback=_known_shape)] = "70b-l2",
    accumulation: Annotated[
        int, typer.Option("--microbatches", min=1, help="Microbatches a step, one sequence each.")
    ] = 1,
    reshard: Annotated[
        bool,
        typer.Option("--reshard/--keep", help="Free parameters after use (ZeRO-3), or once a step (ZeRO-2)."),
    ] = True,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Times to measure every engine, by turns.")] = 1,
    engines: Annotated[list[Engine], typer.Option(help="Repeat for several.")] = list(Engine),  # noqa: B006
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also with every layer compiled, except fairscale's.")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where the ranks run.")] = Device.auto,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; torchrun starts its own.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for the JSON and the picture.", show_default="benchmarks/results")
    ] = RESULTS,
    traces: Annotated[
        Path | None, typer.Option("--trace", help="Folder for a Chrome trace of one step of each engine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    chosen = [Variant(engine) for engine in dict.fromkeys(engines)]
    if compiled:
        chosen += [Variant(v.engine, compiled=True) for v in chosen if v.engine is not Engine.fairscale]
    job = Job(shape, accumulation, reshard, steps, warmup, rounds, tuple(chosen), traces)
    try:
        launch = Launch(None if under_torchrun() else ranks, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": {**asdict(job), "variants": [v.name for v in chosen], "traces": traces is not None},
            "config": asdict(job.config),
            "flops_per_token": flops_per_token(job.config),
            "rows": [summary(row, rows, job) for row in rows],
            "flag_changes_nothing": flag_changes_nothing(rows),
        }
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(payload, indent=2)
        (out / f"{job.name}.json").write_text(text + "\n")
        draw(payload, job, launch.world, out / f"{job.name}.png")
        if as_json:
            typer.echo(text)
        else:
            show(payload, job, launch.world)
            typer.echo(f"Written: {job.name}.json, {job.name}.png in {out.name}/")
    # Only the rank that writes: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
