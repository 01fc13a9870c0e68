"""What `optimize_backward_concat` gives: steps of one Llama-70B layer with it off, and on.

A step is forward and backward of M microbatches, one sequence each, then AdamW.  Gradients are summed in FP32
in the flat buffers, GEMMs are in bf16 or FP8, and parameters are kept for a step (ZeRO-2).  The change of
that name in fairscale (pull request 1180) states 15 % end to end, 30 % of computation, in FP8.  The variants:

    flag off                  autograd's gradients, concatenated before they are reduced
    flag on                   gradients are written where reduce-scatter reads
    + fused weight gradients  GEMMs add them there in FP32; autograd sees none
    + CUDA graphs             whole microbatches are replayed; in FP8, flat buffers also hold FP8 weights

All four use the same layers, optimizer, data and initial values, and are timed by turns in one process.
Before that, five shorter steps run with deterministic kernels, and their losses are compared: those with the
flag off and on must be equal bit for bit.  Fused gradients are not rounded to bf16, so their losses differ.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.flag_measured import (
    COMPARED_MICROBATCHES,
    COMPARED_STEPS,
    Case,
    DType,
    Job,
    Measured,
    Way,
    measure_all,
)
from lib.llama import SHAPES
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks
from flatfsdp.kernels.gemm.gemm import ALIGNMENT

COLORS = {Way.off: "#bab0ac", Way.on: "#a0cbe8", Way.fused: "#4e79a7", Way.replayed: "#59a14f"}


def rows_of(case: Case, found: list[Measured]) -> list[dict[str, Any]]:
    """One row for each variant of a case.

    `times_as_fast` is relative to the flag off; `losses_as_of` is the first variant with the same losses.
    """
    off = found[0]
    return [
        {
            **case._asdict(),
            **asdict(each),
            "label": each.way.label,
            "median_ms": statistics.median(each.ms),
            "times_as_fast": statistics.median(off.ms) / statistics.median(each.ms),
            "losses_as_of": next(
                other.way for other in found if other.compared_losses == each.compared_losses
            ),
        }
        for each in found
    ]


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 140)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    for column in ("GEMMs", "tokens", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms/step", "times\nas fast", "peak\nGiB", "reserved\nGiB", "last\nloss", "same losses as"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        table.add_row(
            *(DType(row["dtype"]).label, f"{row['tokens']:,}", row["label"]),
            f"{row['median_ms']:.1f}",
            f"[bold]{row['times_as_fast']:.2f}[/]",
            *(f"{row['peak_gib']:.1f}", f"{row['peak_reserved_gib']:.1f}"),
            f"{statistics.fmean(losses[-1] for losses in row['compared_losses']):.8f}",
            "-" if row["losses_as_of"] == row["way"] else Way(row["losses_as_of"]).label,
            end_section=row["way"] == Way.replayed,
        )
    console.print(table)
    for row in payload["rows"]:
        if row["eager_microbatches"]:
            name = f"{DType(row['dtype']).label}, {row['tokens']} tokens"
            console.print(
                f"{name}: {row['eager_microbatches']} timed microbatches were eager, not CUDA graphs"
            )
    for failure in payload["failed"]:
        console.print(failure, style="red", markup=False)
    if payload["rows"]:
        answer = "equal bit for bit" if payload["flag_changes_no_bit"] else "NOT equal"
        console.print(
            f"Losses with the flag off and on are {answer}, in {COMPARED_STEPS} steps of "
            f"{COMPARED_MICROBATCHES} microbatches in each case, on every rank."
        )


def _title(payload: dict[str, Any]) -> str:
    job = payload["job"]
    sizes = job["config"]["hidden"], job["config"]["ffn"]
    name = "One Llama-70B layer" if sizes == (8192, 28672) else f"One layer of {sizes[0]}/{sizes[1]}"
    return f"{name}, {payload['ranks']} ranks, {job['microbatches']} microbatches a step"


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws how many times as fast as with the flag off each variant is: a panel for each dtype."""
    rows = payload["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    # Legible where a page shows it at half its width.
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(dtypes)), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=False):
        tokens = list(dict.fromkeys(row["tokens"] for row in rows if row["dtype"] == dtype))
        for offset, way in enumerate(Way):
            found = [row for row in rows if row["dtype"] == dtype and row["way"] == way]
            places = [tokens.index(row["tokens"]) + 0.22 * (offset - 1.5) for row in found]
            heights = [row["times_as_fast"] for row in found]
            bars = panel.bar(places, heights, width=0.21, color=COLORS[way], label=way.label)
            if way is not Way.off:
                panel.bar_label(
                    bars, [f"{height:.2f}" for height in heights], fontsize=13, rotation=90, padding=3
                )
        panel.set_xticks(range(len(tokens)), [f"{each:,}" for each in tokens], fontsize=15)
        panel.set_title(DType(dtype).label, fontsize=16)
        panel.set_xlabel("tokens in a microbatch", fontsize=15)
        panel.tick_params("y", labelsize=14)
        panel.spines[["top", "right"]].set_visible(False)
    fastest = max((row["times_as_fast"] for row in rows), default=1.0)
    panels[0].set_ylim(0, 1.15 * fastest)
    panels[0].yaxis.set_major_locator(MultipleLocator(0.5))
    panels[0].set_ylabel("times as fast as flag off", fontsize=15)
    figure.suptitle(_title(payload), fontsize=16)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=14)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="What optimize_backward_concat gives: one Llama-70B layer with the flag off and on.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/flag.py

    python benchmarks/flag.py --ranks 2 --tokens 1024 --precision fp8 --rounds 5

    python benchmarks/flag.py --device cpu --ranks 2 --tokens 32 --microbatches 4""",
)
def main(
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=16,
            help="In a microbatch, a multiple of 16; repeat for several.",
            show_default="256, 1024, 2048",
        ),
    ] = None,
    precision: Annotated[
        list[DType] | None, typer.Option(help="Of GEMMs; repeat for several.", show_default="both")
    ] = None,
    accumulation: options.Accumulation = 32,
    steps: options.Steps = 2,
    rounds: options.Rounds = 3,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    # For the comparison of losses; timed steps allow all kernels.
    launch = replace(launch_of(ranks, device), deterministic=True)
    config = replace(SHAPES["70b-l2" if launch.use_cuda() else "tiny-l2"], layers=1)
    sizes = dict.fromkeys(tokens or [256, 1024, 2048])
    if wrong := [each for each in sizes if each % ALIGNMENT]:
        raise typer.BadParameter(f"--tokens {wrong[0]} is no multiple of {ALIGNMENT}, which FP8 needs")
    cases = [Case(each, dtype) for dtype in dict.fromkeys(precision or DType) for each in sizes]
    job = Job(config, tuple(cases), accumulation, steps, rounds)
    found = run_on_ranks(measure_all, job, launch)
    if is_main():
        rows: list[dict[str, Any]] = []
        failed: list[str] = []
        for case, each in zip(cases, found, strict=True):
            if isinstance(each, str):
                failed.append(f"{case.dtype.label}, {case.tokens} tokens: {each}")
            else:
                rows += rows_of(case, each)
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": asdict(job),
            "flag_changes_no_bit": all(
                row["losses_as_of"] == Way.off for row in rows if row["way"] == Way.on
            ),
            "rows": rows,
            "failed": failed,
        }
        publish(
            payload,
            out,
            f"flag-{launch.world}",
            draw=partial(draw, payload),
            show=partial(show, payload),
            as_json=as_json,
        )
        if failed or not payload["flag_changes_no_bit"]:
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
