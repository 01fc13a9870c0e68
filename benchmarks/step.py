"""How long does a training step take with FlatFSDP, with PyTorch's FSDP2 and with fairscale's FSDP?

One run measures all engines, one after the other, on the same ranks with the same data, the same initial
values and the same optimizer: forward and backward of M microbatches, one sequence each, then AdamW.  Every
engine keeps FP32 masters and computes in bf16; gradients are reduced in FP32, in the last microbatch's
backward.  FlatFSDP and FSDP2 also accumulate in FP32; fairscale 0.4.13 accumulates in bf16, which moves fewer
bytes.

With `--fp8` it is FlatFSDP's own layers, whose weights are in FP8 in the flat buffer, and FSDP2 with
torchao's float8: one scale a tensor, FP8 all-gather, layers compiled.  Embedding and head are in bf16 on both
sides.

Between engines everything is freed.  The first one is measured once more at the end: if its two figures
differ, the machine drifted by that much, and smaller differences between engines mean nothing.
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
from lib.engines import FP8, OF_FLATFSDP, PLAIN, Engine, Variant
from lib.llama import SHAPES, flops_per_token
from lib.measuring import Job, VariantRuns, measure_all
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.launch import Device, is_main, run_on_ranks
from flatfsdp.profiling.timeline import COLORS
from flatfsdp.profiling.trace import ATTENTION, CLASSES, COMMUNICATION, GEMM, MEMORY


def summary(row: VariantRuns, rows: list[VariantRuns], job: Job) -> dict[str, Any]:
    """One row with what follows from it; times None if it has no run.

    `time_vs_fsdp2` is relative to FSDP2 in the same mode, eager or compiled, `time_vs_fsdp2_float8` to FSDP2
    with torchao; below 1 is faster.
    """
    ms = row.ms
    per_second = None if ms is None else 1e3 * job.microbatches * job.config.seq / ms
    return {
        "name": row.variant.name,
        "label": row.variant.label,
        "skipped": row.skipped,
        "failed": row.failed,
        "ms": ms,
        "tokens_per_s_per_rank": per_second,
        "tflops_per_rank": None if per_second is None else per_second * flops_per_token(job.config) / 1e12,
        "identity": _identity(row),
        "peak_gib": max((run.peak_gib for run in row.runs), default=None),
        "time_vs_fsdp2": _ratio(row, rows, Variant(Engine.fsdp2, row.variant.compiled)),
        "time_vs_fsdp2_float8": _ratio(row, rows, FLOAT8),
        "runs": [{"median_ms": statistics.median(run.ms), **asdict(run)} for run in row.runs],
    }


def _identity(row: VariantRuns) -> dict[str, float] | None:
    """What it costs that collectives carry what they are for: medians of steps taken by turns."""
    checked = [ms for run in row.runs for ms in run.checked_ms or ()]
    unchecked = [ms for run in row.runs for ms in run.unchecked_ms or ()]
    if not checked:
        return None
    on, off = statistics.median(checked), statistics.median(unchecked)
    return {"on_ms": on, "off_ms": off, "on_vs_off": on / off}


FLOAT8 = Variant.first_of(Engine.fsdp2_float8)


def _ratio(row: VariantRuns, rows: list[VariantRuns], peer: Variant) -> float | None:
    theirs = next((other.ms for other in rows if other.variant == peer), None)
    return None if row.ms is None or theirs is None else row.ms / theirs


def same_losses(rows: list[VariantRuns]) -> dict[str, bool]:
    """Whether FlatFSDP's losses are the same in every step, for each mode: with the flag off and on, wrapped
    and in place."""
    losses = {row.variant: row.runs[0].losses for row in rows if row.runs}
    found = {}
    for compiled, mode in ((False, "eager"), (True, "compile")):
        variants = [Variant(engine, compiled) for engine in OF_FLATFSDP]
        ours = [losses[variant] for variant in variants if variant in losses]
        if len(ours) > 1:
            found[mode] = all(each == ours[0] for each in ours)
    return found


def show(payload: dict[str, Any], job: Job, ranks: int) -> None:
    console = Console()
    console.width = max(console.width, 140)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(job, ranks)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    ratios = _ratios(job)
    figures = ("ms/step", "tokens/s\nper rank", "TFLOP/s\nper rank", "peak\nGiB", "between\nsteps")
    for column in (*figures, *(f"time vs\n{peer}" for peer in ratios)):
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
            f"{row['runs'][0]['static_gib']:.1f}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in ratios.values()),
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
    _show_memory(payload, console)
    for row in payload["rows"]:
        if (cost := row["identity"]) is not None:
            console.print(
                f"{row['label']}: {cost['on_ms']:.2f} ms/step where collectives carry what they are for, "
                f"{cost['off_ms']:.2f} where they do not: {cost['on_vs_off']:.4f}",
                highlight=False,
            )
    _show_breakdown(payload, console)
    leftovers = [run["leftover_gib"] for row in payload["rows"] for run in row["runs"]]
    if leftovers and max(leftovers) - min(leftovers) > 0.5:
        console.print(
            f"[red]Up to {max(leftovers) - min(leftovers):.1f} GiB of earlier runs were not freed.[/]"
        )
    for mode, same in payload["same_losses"].items():
        answer = "the same in every step" if same else "not the same (attention's backward need not repeat)"
        console.print(f"FlatFSDP, {mode}: losses with the flag off and on, and in place, are {answer}.")


def _ratios(job: Job) -> dict[str, str]:
    """Whom times are relative to in this run: its name and its key in a summary."""
    engines = {variant.engine for variant in job.variants}
    found = {"FSDP2": "time_vs_fsdp2"} if Engine.fsdp2 in engines else {}
    return found | ({"torchao": "time_vs_fsdp2_float8"} if Engine.fsdp2_float8 in engines else {})


def _show_memory(payload: dict[str, Any], console: Console) -> None:
    for row in payload["rows"]:
        for run in row["runs"][:1]:
            if run["reported_gib"] is not None and run["static_gib"] > 0:
                share = run["reported_gib"] / run["static_gib"]
                console.print(
                    f"{row['label']}: {run['static_gib']:.2f} GiB between steps, of which the memory report "
                    f"lists {run['reported_gib']:.2f} ({share:.1%})",
                    highlight=False,
                )


def _show_breakdown(payload: dict[str, Any], console: Console) -> None:
    """One line for each engine that was profiled: milliseconds of rank 0's GPU."""
    found = {
        row["label"]: run["breakdown"]
        for row in payload["rows"]
        for run in row["runs"][:1]
        if run["breakdown"] is not None
    }
    if not found:
        return
    title = "\nOne profiled step of rank 0, ms in which a class ran (and no other)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    for column in (*CLASSES, "gaps", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, parts in found.items():
        shares = (parts["shares"][name] for name in CLASSES)
        table.add_row(
            label,
            *(f"{share['busy_ms']:.1f} ({share['alone_ms']:.1f})" for share in shares),
            f"{parts['gaps_ms']:.1f}",
            f"{parts['step_ms']:.1f}",
        )
    console.print(table)


def _title(job: Job, ranks: int) -> str:
    zero = "freed after use (ZeRO-3)" if job.reshard else "kept for a step (ZeRO-2)"
    return f"Training step of {job.shape}, {ranks} ranks, M = {job.microbatches}, parameters {zero}"


ENGINE_COLORS = {
    Engine.flat_off: "#76b7b2",
    Engine.flat_on: "#4e79a7",
    Engine.flat_in_place: "#a0cbe8",
    Engine.fsdp2: "#f28e2b",
    Engine.fairscale: "#bab0ac",
    Engine.flat_fp8_delayed: "#59a14f",
    Engine.flat_fp8_current: "#8cd17d",
    Engine.flat_bf16_fused: "#4e79a7",
    Engine.fsdp2_float8: "#e15759",
}


def draw(payload: dict[str, Any], job: Job, ranks: int, path: Path) -> None:
    """One bar for each variant that ran: milliseconds a step; below, what its GPU did if that is known."""
    rows = [row for row in payload["rows"] if row["runs"]]
    profiled = [row for row in rows if row["runs"][0]["breakdown"] is not None]
    panels = [len(rows), len(profiled)] if profiled else [len(rows)]
    figure = Figure(figsize=(9, len(panels) + 0.4 * sum(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=panels)[:, 0]
    _draw_times(axes[0], rows, job)
    axes[0].set_title(_title(job, ranks), loc="left", fontsize=10)
    if profiled:
        _draw_breakdowns(axes[1], profiled)
    for axis in axes:
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_times(axis: Any, rows: list[dict[str, Any]], job: Job) -> None:
    colors = {variant.label: ENGINE_COLORS[variant.engine] for variant in job.variants}
    for row in rows:
        axis.barh(row["label"], row["ms"], color=colors[row["label"]], height=0.7)
        compared = "".join(
            f", {row[key]:.3f} of {peer}'s time" for peer, key in _ratios(job).items() if row[key] is not None
        )
        note = f" {row['ms']:.1f} ms, {row['tflops_per_rank']:.0f} TFLOP/s{compared}"
        axis.text(row["ms"], row["label"], note, va="center", fontsize=9)
    axis.set_xlim(right=1.6 * max((row["ms"] for row in rows), default=1.0))
    axis.set_xlabel("ms per step, forward, backward and AdamW (median)")


OVERLAP, GAPS = "two classes or more", "gaps"
CLASS_COLORS = {
    **{name: COLORS[name] for name in (GEMM, ATTENTION, MEMORY)},
    OVERLAP: "#edc948",
    COMMUNICATION: COLORS[COMMUNICATION],
    GAPS: "#bab0ac",
}


def _draw_breakdowns(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Stacked: each class's time alone, time in which classes overlap, and gaps."""
    labels = [row["label"] for row in rows]
    found = [row["runs"][0]["breakdown"] for row in rows]
    left = [0.0] * len(rows)
    for name, color in CLASS_COLORS.items():
        if name in CLASSES:
            widths = [parts["shares"][name]["alone_ms"] for parts in found]
        else:
            widths = [parts["overlap_ms" if name == OVERLAP else "gaps_ms"] for parts in found]
        axis.barh(labels, widths, left=left, color=color, height=0.7, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms of one profiled step, rank 0's GPU: only that class ran")
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


@app.command(
    help="Training step of FlatFSDP beside FSDP2, torchao and fairscale: same ranks, data and model.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 70b-l2 --microbatches 16 --keep

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --compile

    torchrun --nproc-per-node 4 benchmarks/step.py --fp8 --shape 8b --breakdown

    torchrun --nproc-per-node 4 benchmarks/step.py --engines flat-on --engines fsdp2 --rounds 3 --json

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --engines flat-on --steps 20 --identity

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
    steps: options.Steps = 10,
    warmup: options.Warmup = 4,
    rounds: options.Rounds = 1,
    engines: Annotated[
        list[Engine] | None, typer.Option(help="Repeat for several.", show_default="all of the plain Llama")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="FlatFSDP's own layers and torchao's float8.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="The plain Llama also with every layer compiled.")
    ] = False,
    own_adamw: Annotated[
        bool,
        typer.Option("--own-adamw/--torch-adamw", help="Which AdamW steps FlatFSDP's own layers."),
    ] = True,
    device: options.OnDevice = Device.auto,
    ranks: options.Ranks = 1,
    out: options.Out = RESULTS,
    breakdown: options.Breakdown = False,
    traces: Annotated[
        Path | None, typer.Option("--trace", help="Folder for a Chrome trace of one step of each engine.")
    ] = None,
    identity: Annotated[
        bool,
        typer.Option("--identity", help="Time FlatFSDP's steps with unchecked collectives, too, by turns."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    wanted = engines or (FP8 if fp8 else PLAIN)
    chosen = [Variant.first_of(engine) for engine in dict.fromkeys(wanted)]
    if compiled:
        chosen += [Variant(v.engine, compiled=True) for v in chosen if v.can_be_compiled]
    job = Job(
        *(shape, accumulation, reshard, steps, warmup, rounds),
        variants=tuple(chosen),
        own_adamw=own_adamw,
        breakdown=breakdown,
        traces=traces,
        identity=identity,
    )
    launch = launch_of(ranks, device)
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": {**asdict(job), "variants": [v.name for v in chosen], "traces": traces is not None},
            "config": asdict(job.config),
            "flops_per_token": flops_per_token(job.config),
            "rows": [summary(row, rows, job) for row in rows],
            "same_losses": same_losses(rows),
        }
        publish(
            payload,
            out,
            job.name,
            draw=partial(draw, payload, job, launch.world),
            show=partial(show, payload, job, launch.world),
            as_json=as_json,
        )
    # Only the rank that writes: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
