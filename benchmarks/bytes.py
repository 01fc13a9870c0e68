"""Bytes that each engine copies and sends for one parameter in one optimizer step.

They are measured from outside (`flatfsdp.profiling.copy_counter`), in the same way for FlatFSDP and PyTorch's
FSDP2, and shown beside the number that each design promises.  The model is four equal units with FP32 master
parameters, bf16 compute and FP32 reduction, over gloo; the second step is counted, which excludes set-up.
With FP8 weights, which are nearly all parameters then, it uses FlatFSDP's own layers, and torchao's float8
with FP8 all-gather.  Engines that cannot run here (fairscale needs CUDA) are shown by their formula.

Local bytes are reads plus writes of copy kernels on one rank, without GEMMs, the optimizer and the internal
work of collectives (such as the division by the number of ranks).  FlatFSDP's FP8 layers accumulate weight
gradients inside the GEMMs.  Wire bytes are (N - 1) / N of each collective's payload.

Next: `lib/bytes_measured.py` measures, `lib/bytes_formulas.py` has the formulas.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from lib import options
from lib.bytes_formulas import CASES, UNITS, WEIGHTS, Case
from lib.bytes_measured import CountedBytes, equal, measure_all
from lib.common import RESULTS, environment, publish, results_of_ranks
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


class Part(NamedTuple):
    """The presentation of one part of the local bytes."""

    heading: str
    meaning: str
    color: str


PARTS = {
    "cast": Part("cast", "cast FP32 to bf16 or FP8", "#4e79a7"),
    "amax": Part("amax", "largest magnitude", "#a0cbe8"),
    "transpose": Part("trans-\npose", "transpose", "#59a14f"),
    "copy": Part("copy\nin/out", "copy in / copy out", "#f28e2b"),
    "concat": Part("concat", "concat", "#e15759"),
    "accumulate": Part("accu-\nmulate", "widen and add", "#76b7b2"),
    "other": Part("other", "scale, clamp, divide, zero-fill", "#bab0ac"),
}
"""The parts of a `Traffic`, from left to right."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Bytes that FlatFSDP, FSDP2, torchao and fairscale copy and send per parameter and step.",
    epilog="""Examples:

    python benchmarks/bytes.py

    python benchmarks/bytes.py --ranks 2 --microbatches 1 --microbatches 8

    python benchmarks/bytes.py --json > bytes.json""",
)
def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of gloo ranks; repeat for several.")] = [2, 4],  # noqa: B006
    accumulation: Annotated[
        list[int],
        typer.Option("--microbatches", help="Microbatches per optimizer step; repeat for several."),
    ] = [1, 4],  # noqa: B006
    as_json: options.Json = False,
) -> None:
    rows: list[CountedBytes] = []
    for world_size in ranks:
        cases = [(case, steps) for steps in accumulation for case in _cases(steps)]
        per_rank = results_of_ranks(world_size, measure_all, cases)
        for row, *others in zip(*per_rank, strict=True):
            assert all(other == row for other in others), f"ranks disagree about {row.label}"
            rows.append(row)
    payload = {
        "environment": environment(),
        "units": UNITS,
        "weights": WEIGHTS,
        "rows": [_as_dict(row) for row in rows],
    }
    publish(payload, RESULTS, "bytes", draw=partial(draw, rows), show=partial(show, rows), as_json=as_json)
    if any(row.disagreements() for row in rows):
        raise typer.Exit(1)


def _cases(steps: int) -> list[Case]:
    """The distinct cases: with one microbatch, "every" and "last" are the same."""
    return list(CASES) if steps > 1 else [case for case in CASES if case.sync == "last"]


def _as_dict(row: CountedBytes) -> dict[str, Any]:
    return {
        "label": row.label,
        **asdict(row),
        "local": {
            "measured": None if row.measured is None else row.measured.local,
            "promised": row.promised.local,
        },
        "disagreements": row.disagreements(),
    }


def show(rows: list[CountedBytes]) -> None:
    """Prints one table per number of ranks and microbatches, with disagreements in red below it."""
    console = Console()
    console.width = max(console.width, 130)  # a table that wraps says nothing
    for ranks, steps in dict.fromkeys((row.ranks, row.microbatches) for row in rows):
        title = f"N = {ranks} ranks, {_counted(steps)}: bytes per parameter, calls per unit, in one step"
        table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 0, 0, 1))
        table.add_column("engine", no_wrap=True)
        for column in (*(part.heading for part in PARTS.values()), "total", "formula"):
            table.add_column(column, justify="right", no_wrap=True)
        for column in ("AG\ncalls", "AG\nwire", "RS\ncalls", "RS\nwire"):
            table.add_column(column, justify="right", style="cyan", no_wrap=True)
        chosen = [row for row in rows if (row.ranks, row.microbatches) == (ranks, steps)]
        for row in chosen:
            got = row.shown
            color = "red" if row.disagreements() else "green"
            table.add_row(
                row.label,
                *(f"{getattr(got, part):.2f}" for part in PARTS),
                f"[bold]{got.local:.2f}[/]",
                f"[{color}]{row.promised.local:.2f}[/]",
                *(f"{got.gathers:g}", f"{got.wire_gather:.2f}", f"{got.reduces:g}", f"{got.wire_reduce:.2f}"),
            )
        console.print(table)
        for row in chosen:
            for line in row.disagreements():
                console.print(f"[red]{row.label}: {line}[/]")
    if not any(row.disagreements() for row in rows):
        console.print("Every measurement equals its formula, and FlatFSDP's ledger agrees.")


def _counted(steps: int) -> str:
    return f"M = {steps} microbatch{'es' if steps > 1 else ''}"


def draw(rows: list[CountedBytes], path: Path) -> None:
    """Draws stacked bars of local bytes for most ranks, one panel per number of microbatches."""
    ranks = max(row.ranks for row in rows)
    panels = list(dict.fromkeys(row.microbatches for row in rows))
    groups = [[r for r in rows if (r.ranks, r.microbatches) == (ranks, steps)] for steps in panels]
    heights = [len(group) for group in groups]
    figure = Figure(figsize=(9, 0.9 * len(panels) + 0.36 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axis, steps, group in zip(axes, panels, groups, strict=True):
        labels = [row.label for row in group]
        left = [0.0] * len(group)
        for name, part in PARTS.items():
            widths = [getattr(row.shown, name) for row in group]
            axis.barh(labels, widths, left=left, color=part.color, label=part.meaning, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, total in zip(group, left, strict=True):
            agrees = equal(row.shown.local, row.promised.local)
            note = "" if agrees else f" (formula: {row.promised.local:g})"
            axis.text(total, row.label, f" {total:.1f}{note}", va="center", fontsize=9)
        axis.set_title(_counted(steps), loc="left", fontsize=10)
        axis.set_xlim(right=1.08 * max(left))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("bytes copied per parameter per optimizer step (reads + writes on one rank)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    title = "Local copies outside of matrix products, FP32 master and reduction"
    figure.suptitle(f"{title}, N = {ranks} ranks", fontsize=11)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app()
