"""Reports of `step.py` and `hf.py` about measured variants: rows, a table and a picture.

In:   the `VariantRuns` of all variants.
Out:  `summary` makes a row for the JSON file; `show` and `draw` read such rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.profiling.step_time import ATTENTION, CLASSES, COMMUNICATION, GEMM, MEMORY
from lib.llama import LlamaConfig, flops_per_token
from lib.measuring import Job, V, Variant, VariantRuns

Row = dict[str, Any]


def summary(row: VariantRuns[V], job: Job[V], config: LlamaConfig) -> Row:
    """One variant with figures derived from its runs; None without a run.

    Args:
        row: the variant's runs.
        job: the settings.
        config: sizes of the trained model.
    """
    ms = row.ms
    per_second = None if ms is None else 1e3 * job.microbatches * config.seq / ms
    return {
        "name": row.variant.name,
        "label": row.variant.label,
        "skipped": row.skipped,
        "failed": row.failed,
        "ms": ms,
        "tokens_per_s_per_rank": per_second,
        "tflops_per_rank": None if per_second is None else per_second * flops_per_token(config) / 1e12,
        "peak_gib": max((run.peak_gib for run in row.runs), default=None),
        "peak_reserved_gib": max((run.peak_reserved_gib for run in row.runs), default=None),
        "host_ms": min((run.host_ms for run in row.runs if run.host_ms is not None), default=None),
        "not_replayed": _not_replayed(row, job),
        "runs": [{"median_ms": statistics.median(run.ms), **asdict(run)} for run in row.runs],
    }


def _not_replayed(row: VariantRuns[V], job: Job[V]) -> int | None:
    """Number of microbatches in timed steps that should have been CUDA graphs and were not.

    The time is not theirs then.  None if none should have been one.
    """
    counts = [run.replays for run in row.runs if run.replays is not None]
    return len(counts) * job.steps * job.microbatches - sum(counts) if counts else None


def time_against(
    ms: float | None, peers: Collection[Variant], rows: Sequence[VariantRuns[V]]
) -> float | None:
    """Time relative to the fastest of these; below 1 is faster, None if one side was not measured."""
    theirs = [row.ms for row in rows if row.variant in peers and row.ms is not None]
    return None if ms is None or not theirs else ms / min(theirs)


def title_of(what: str, payload: Mapping[str, Any]) -> str:
    """The title of a table or picture of a JSON file's contents."""
    job = payload["job"]
    zero = "ZeRO-3" if job["reshard"] else "ZeRO-2"
    return f"{what}, {payload['ranks']} ranks, {job['microbatches']} microbatches, {zero}"


# ---- text -----------------------------------------------------------------------------------------------


def console_of() -> Console:
    console = Console()
    console.width = max(console.width, 140)  # a table that wraps says nothing
    return console


def show(rows: Sequence[Row], title: str, ratios: Mapping[str, str], console: Console) -> None:
    """Prints times, memory and losses of each variant; then failures, memory between steps, and kernels.

    Args:
        rows: results of `summary`.
        title: title of the table.
        ratios: references of relative times, and the keys of a row that hold them.
        console: where to print.
    """
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    figures = ("ms/step", "tokens/s\nper rank", "TFLOP/s\nper rank", "peak\nGiB", "between\nsteps")
    for column in (*figures, *(f"time vs\n{peer}" for peer in ratios)):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("first\nloss", "last\nloss", "ms/step\nof each run"):
        table.add_column(column, justify="right", style="cyan", no_wrap=True)
    for row in rows:
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
    for row in rows:
        if row["failed"]:
            console.print(f"{row['label']} failed: {row['failed']}", style="red", markup=False)
        elif row["skipped"]:
            console.print(f"{row['label']}: skipped, {row['skipped']}", markup=False)
    _show_host(rows, console)
    _show_memory(rows, console)
    _show_breakdown(rows, console)


def _show_host(rows: Sequence[Row], console: Console) -> None:
    """Prints the host's time, and which rows have not measured what they state."""
    for row in rows:
        if row["host_ms"] is not None:
            console.print(
                f"{row['label']}: {row['host_ms']:.3f} ms of the host a microbatch, peak "
                f"{row['peak_reserved_gib']:.1f} GiB reserved",
                highlight=False,
            )
        if row["not_replayed"]:
            console.print(
                f"{row['label']}: {row['not_replayed']} timed microbatches were eager, not replayed: its "
                "time is not that of replays",
                style="red",
                highlight=False,
            )


def _show_memory(rows: Sequence[Row], console: Console) -> None:
    for row in rows:
        for run in row["runs"][:1]:
            if run["reported_gib"] is not None and run["static_gib"] > 0:
                share = run["reported_gib"] / run["static_gib"]
                console.print(
                    f"{row['label']}: {run['static_gib']:.2f} GiB between steps, of which the memory report "
                    f"lists {run['reported_gib']:.2f} ({share:.1%})",
                    highlight=False,
                )
    leftovers = [run["leftover_gib"] for row in rows for run in row["runs"]]
    if leftovers and max(leftovers) - min(leftovers) > 0.5:
        console.print(
            f"[red]Up to {max(leftovers) - min(leftovers):.1f} GiB of earlier runs were not freed.[/]"
        )


def _show_breakdown(rows: Sequence[Row], console: Console) -> None:
    """Prints one line for each profiled engine: milliseconds of rank 0's GPU."""
    found = {
        row["label"]: run["breakdown"]
        for row in rows
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


# ---- picture --------------------------------------------------------------------------------------------

OVERLAP, GAPS = "two classes or more", "gaps"
CLASS_COLORS = {
    GEMM: "#4e79a7",
    ATTENTION: "#f28e2b",
    MEMORY: "#76b7b2",
    OVERLAP: "#edc948",
    COMMUNICATION: "#e15759",
    GAPS: "#bab0ac",
}


LARGE = 13
"""Points of text that is legible where a page shows the picture at half its width."""


def draw(rows: Sequence[Row], title: str, colors: Mapping[str, str], path: Path) -> None:
    """Draws one bar for each variant that ran: milliseconds per step; below, its GPU's breakdown if known.

    Args:
        rows: results of `summary`.
        title: title of the picture.
        colors: by the name of a row.
        path: the file.
    """
    rows = [row for row in rows if row["runs"]]
    # Files of the first runs have no such key.
    profiled = [row for row in rows if row["runs"][0].get("breakdown") is not None]
    panels = [len(rows), len(profiled)] if profiled else [len(rows)]
    figure = Figure(figsize=(9, 1.2 + len(panels) + 0.42 * sum(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=panels)[:, 0]
    figure.suptitle(title, x=0.01, ha="left", fontsize=LARGE)
    _draw_times(axes[0], rows, colors)
    if profiled:
        _draw_breakdowns(axes[1], profiled)
        handles, names = axes[1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=3, fontsize=LARGE, frameon=False)
    for axis in axes:
        axis.invert_yaxis()
        axis.tick_params(labelsize=LARGE)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_times(axis: Any, rows: Sequence[Row], colors: Mapping[str, str]) -> None:
    for row in rows:
        axis.barh(row["label"], row["ms"], color=colors[row["name"]], height=0.75)
        axis.text(row["ms"], row["label"], f" {row['ms']:.0f}", va="center", fontsize=LARGE)
    axis.set_xlim(right=1.15 * max((row["ms"] for row in rows), default=1.0))
    axis.set_xlabel("ms a step (median)", fontsize=LARGE)


def _draw_breakdowns(axis: Any, rows: Sequence[Row]) -> None:
    """Draws stacks: each class's time alone, time in which classes overlap, and gaps."""
    labels = [row["label"] for row in rows]
    found = [row["runs"][0]["breakdown"] for row in rows]
    left = [0.0] * len(rows)
    for name, color in CLASS_COLORS.items():
        if name in CLASSES:
            widths = [parts["shares"][name]["alone_ms"] for parts in found]
        else:
            widths = [parts["overlap_ms" if name == OVERLAP else "gaps_ms"] for parts in found]
        axis.barh(labels, widths, left=left, color=color, height=0.75, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms in which only this ran, one step of rank 0's GPU", fontsize=LARGE)
