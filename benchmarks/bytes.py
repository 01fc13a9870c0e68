"""Bytes that each engine copies and sends for one parameter in one optimizer step.

They are measured from outside (`lib/copy_counter.py`), in the same way for FlatFSDP and PyTorch's
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
from typing import Annotated, Any

import typer
from lib import options
from lib.bytes_formulas import CASES, UNITS, WEIGHTS, Case
from lib.bytes_measured import CountedBytes, measure_all
from lib.common import RESULTS, environment, publish, results_of_ranks
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

PARTS = {
    "cast": "cast",
    "amax": "amax",
    "transpose": "trans-\npose",
    "copy": "copy\nin/out",
    "concat": "concat",
    "accumulate": "accu-\nmulate",
    "other": "other",
}
"""The parts of a `Traffic`, from left to right, and their headings."""

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
    publish(
        payload, RESULTS, "bytes", draw=partial(redraw, payload), show=partial(show, rows), as_json=as_json
    )
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
        for column in (*PARTS.values(), "total", "formula"):
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


def redraw(payload: dict[str, Any], path: Path) -> None:
    """Draws one bar for each engine: ZeRO-3, bf16, most ranks and microbatches, reduced in the last."""
    ranks, steps = (max(row[key] for row in payload["rows"]) for key in ("ranks", "microbatches"))
    rows = [
        row
        for row in payload["rows"]
        if (row["ranks"], row["microbatches"], row["case"]["zero"]) == (ranks, steps, 3)
        and row["case"]["sync"] == "last"
        and not row["case"]["fp8"]
    ]
    figure = Figure(figsize=(8, 1.6 + 0.6 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        case = row["case"]
        name = f"FlatFSDP, {'on' if case['concat_free'] else 'off'}"
        label = name if case["engine"] == "FlatFSDP" else case["engine"]
        is_measured = row["measured"] is not None
        total = row["local"]["measured" if is_measured else "promised"]
        axis.barh(label, total, color="#4e79a7" if label == name else "#f28e2b", height=0.7)
        axis.text(
            total, place, f" {total:.1f}{'' if is_measured else ' (formula)'}", va="center", fontsize=14
        )
    axis.set_xlim(right=1.3 * max(row["local"]["promised"] for row in rows))
    axis.set_xticks([])
    axis.tick_params(axis="y", labelsize=14, length=0)
    axis.invert_yaxis()
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("Bytes that a rank copies, per parameter and step", x=0.01, ha="left", fontsize=16)
    axis.set_xlabel(
        f"{ranks} ranks, {_counted(steps)}, ZeRO-3; on, off: optimize_backward_concat", fontsize=11
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app()
