"""Speed of each kernel beside a plain copy, and of weight gradients beside a GEMM and an addition.

Memory-bound kernels run at sizes of real layers: 8192 tokens, or --tokens.  The bytes of each are those that
it has to read and write by the formula in its docstring.  Divided by its time they give a bandwidth, which is
compared with that of a copy of as many bytes in the same run (read + write), and of a large one: a launch of
20 microseconds spends some of them on starting and ending, and so does a copy.  The update of the scales has
few bytes: there the time counts.

Weight gradients are added to an FP32 buffer, by the GEMM itself (`flatfsdp.kernels.gemm.wgrad`) and by
PyTorch's GEMM into a temporary and an addition; bf16 also by `torch.addmm` in place.

A time is the median over the rounds.  In each round every kernel runs once, in random order: a batch of
consecutive calls between two CUDA events.  Calls of a batch work on different data in turns, so that they
find nothing in the L2 cache, and the device sleeps until the host is ahead.  Data are normal random numbers,
and results are checked to be finite: NaNs and zeros run faster.

Targets: 85 % of the equal copy, 75 % for the norms' backward, whose sums over rows cost registers; FP8 weight
    gradients
in place 1.10 times as fast as a GEMM and an addition.

1 TB is 10^12 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lib import options
from lib.common import RESULTS, environment, publish
from lib.kernel_cases import IN_PLACE, Bench
from lib.kernel_sizes import FULL, TINY
from lib.kernel_times import WGRAD, measured_gemms, measured_kernels
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    if payload["kernels"]:
        console.print(_kernel_table(payload["kernels"]))
    if payload["wgrad"]:
        console.print(_gemm_table(payload["wgrad"]))
    reached = [row["reached"] for row in payload["kernels"] + payload["wgrad"] if row["reached"] is not None]
    if reached:
        console.print(f"{sum(reached)} of {len(reached)} reach their target; those in red do not.")


def _kernel_table(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "Kernels beside a copy",
        ("kernel", "what", "size"),
        ("MB", "us", "TB/s", "of a large\ncopy", "of an\nequal copy"),
    )
    last = ""
    for row in rows:
        figures = ["", f"{row['us']:.1f}", "", "", ""]
        if row["bytes"] is not None:
            figures[0] = f"{row['bytes'] / 1e6:.0f}"
            equal = _judged(f"{row['share_of_equal']:.1%}", row)
            figures[2:] = f"{row['tb_s']:.2f}", f"{row['share']:.1%}", equal
        table.add_row("" if row["kernel"] == last else row["kernel"], row["variant"], row["size"], *figures)
        last = row["kernel"]
    return table


def _gemm_table(rows: list[dict[str, Any]]) -> Table:
    title = f"Weight gradients into an FP32 buffer, {rows[0]['tokens']} tokens: TFLOP/s"
    shapes = {row["shape"]: f"{row['shape']}\n{row['out']} x {row['in']}" for row in rows}
    table = _table(title, ("dtype", "path"), tuple(shapes.values()))
    for dtype, path in dict.fromkeys((row["dtype"], row["path"]) for row in rows):
        found = [row for row in rows if (row["dtype"], row["path"]) == (dtype, path)]
        cells = [_judged(f"{row['tflops']:.0f}  ({row['ratio']:.3f})", row) for row in found]
        table.add_row(dtype, path, *cells)
    table.caption = "In brackets: speed relative to PyTorch's GEMM, then add_."
    table.caption_justify = "left"
    return table


def _judged(text: str, row: dict[str, Any]) -> str:
    """Formats in bold, and red below the target."""
    return f"[bold red]{text}[/]" if row["reached"] is False else f"[bold]{text}[/]"


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws shares of the bandwidth of a copy, and TFLOP/s of weight gradients; red below a target."""
    kernels = [row for row in payload["kernels"] if row["share"] is not None]
    heights = [max(1, len(kernels)), max(1, len(payload["wgrad"]))]
    figure = Figure(figsize=(9, 1.8 + 0.24 * sum(heights)), layout="constrained")
    above, below = figure.subplots(2, height_ratios=heights)
    labels = [" ".join(filter(None, (row["kernel"], row["variant"], row["size"]))) for row in kernels]
    _bars(
        above, labels, kernels, "share_of_equal", "{:.1%}", "bandwidth, relative to a copy of as many bytes"
    )
    above.axvline(1.0, color="#888888", linewidth=1)
    labels = [f"{row['shape']}, {row['dtype']}: {row['path']}" for row in payload["wgrad"]]
    _bars(below, labels, payload["wgrad"], "tflops", "{:.0f}", "weight gradients, TFLOP/s")
    figure.suptitle(payload["environment"]["name"], x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=150)


def _bars(axis: Any, labels: list[str], rows: list[dict[str, Any]], key: str, form: str, title: str) -> None:
    values, positions = [row[key] for row in rows], range(len(rows))
    is_peer = [row.get("kernel") == "copy" or row.get("path", IN_PLACE) != IN_PLACE for row in rows]
    colors = [
        "#bab0ac" if peer else "#e15759" if row["reached"] is False else "#4e79a7"
        for row, peer in zip(rows, is_peer, strict=True)
    ]
    axis.barh(positions, values, color=colors, height=0.7)
    axis.set_yticks(positions, labels, fontsize=7)
    for position, value in zip(positions, values, strict=True):
        axis.text(value, position, f" {form.format(value)}", va="center", fontsize=7)
    axis.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * max(values, default=1.0))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, loc="left", fontsize=9)


# -- the command -----------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Kernels beside a copy of the same bytes, weight gradients beside a GEMM and an addition.",
    epilog="""Examples:

    python benchmarks/kernels.py

    python benchmarks/kernels.py --tokens 32768 --only cast --only norm_forward

    python benchmarks/kernels.py --quick --json

    python benchmarks/kernels.py --only rope --rounds 20

    python benchmarks/kernels.py --device cpu""",
)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds.")] = False,
    only: Annotated[
        list[str], typer.Option(help="Kernels to measure, or wgrad; repeat for several.", show_default="all")
    ] = [],  # noqa: B006
    tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Rows of activations; the files' name has them.", show_default="8192"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Batches of each.", show_default="10, or 3 if --quick")
    ] = None,
    device: options.OneDevice = Device.cuda,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    kind = options.one_device(device)
    rounds = rounds or (3 if quick else 10)
    torch.manual_seed(0)
    sizes = TINY if kind.type == "cpu" else FULL
    bench = Bench(sizes if tokens is None else replace(sizes, tokens=tokens), kind, quick)
    payload = {
        "environment": environment(kind.type),
        "rounds": rounds,
        "kernels": measured_kernels(bench, only, rounds),
        "wgrad": measured_gemms(bench, rounds) if not only or WGRAD in only else [],
    }
    name = "kernels" if tokens is None else f"kernels-{tokens}"
    publish(payload, out, name, draw=partial(draw, payload), show=partial(show, payload), as_json=as_json)


if __name__ == "__main__":
    app()
