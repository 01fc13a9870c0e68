"""Speed of a linear layer's FP8 GEMMs, in the forward and for the input's gradient, beside PyTorch's.

Both are cuBLASLt.  PyTorch uses its first choice of an algorithm, determined anew in every call; ours is
kept, and has the tile that `kernels/gemm/tiles.py` prefers.  With --sweep every tile that cuBLASLt offers is
measured as well, as was done for the rules there.

A time is the median over the rounds.  In each round everything runs once, in random order: a batch of
consecutive calls between two CUDA events.  Data are normal random numbers, and results are checked to be
finite: the clock of a GPU depends on the power that the numbers cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from lib import options
from lib.common import RESULTS, environment, publish
from lib.kernel_cases import BF16, E4M3, E5M2, Call
from lib.kernel_times import Timed, measure
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flatfsdp.comm.launch import Device
from flatfsdp.kernels.gemm import cublas_lt
from flatfsdp.kernels.gemm.gemm import scaled_mm

LAYERS = {
    # columns of the input, of the output
    "GPT qkv": (4096, 12288),
    "GPT fc1": (4096, 16384),
    "GPT fc2": (16384, 4096),
    "1B gate_up": (2048, 16384),
    "1B down": (8192, 2048),
    "8B qkv": (4096, 6144),
    "8B out": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "70B gate_up, TP 4": (8192, 14336),
    "70B down, TP 4": (7168, 8192),
}
OURS, TORCH = "flatfsdp", "PyTorch"


@dataclass(frozen=True)
class ProductTime:
    """One GEMM, computed in one way.

    Attributes:
        direction: fprop or dgrad.
        path: flatfsdp, PyTorch, or the tile of the result by its name in cuBLASLt.
        speed: relative to PyTorch's.
    """

    layer: str
    direction: str
    tokens: int
    columns: int
    inner: int
    path: str
    us: float = 0.0
    tflops: float = 0.0
    speed: float = 1.0

    @property
    def product(self) -> tuple[str, str, int]:
        """The key of the GEMM, whatever its path."""
        return self.layer, self.direction, self.tokens

    def timed(self, us_of_each_round: list[float]) -> ProductTime:
        """A copy with the time of these rounds."""
        us = statistics.median(us_of_each_round)
        return replace(self, us=us, tflops=2 * self.tokens * self.columns * self.inner / us / 1e6)


def products(
    layers: dict[str, tuple[int, int]], tokens: list[int], sweep: bool, device: torch.device
) -> Iterator[tuple[ProductTime, Call]]:
    """Measures every GEMM in every way; the ways share their data."""
    for count in tokens:
        for name, (inner, outer) in layers.items():
            for direction, dtype, columns, summed in (
                ("fprop", E4M3, outer, inner),
                ("dgrad", E5M2, inner, outer),
            ):
                a = torch.randn(count, summed, device=device, dtype=BF16).to(dtype)
                b = torch.randn(columns, summed, device=device, dtype=BF16).to(E4M3)
                row = ProductTime(name, direction, count, columns, summed, OURS)
                for path, call in _ways(a, b, direction == "dgrad", sweep):
                    yield replace(row, path=path), call


def _ways(a: Tensor, b: Tensor, split: bool, sweep: bool) -> Iterator[tuple[str, Call]]:
    one = torch.ones(1, device=a.device)
    yield (
        OURS,
        partial(scaled_mm, a, b, one, one, bias=None, out_dtype=BF16, split_accumulator=split),
    )
    yield (
        TORCH,
        partial(
            torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=not split
        ),
    )
    if not sweep:
        return
    sizes = (a.shape[0], b.shape[0], a.shape[1])
    product = cublas_lt.Product(*sizes, a.dtype, b.dtype, BF16, split_accumulator=split)
    for tile in cublas_lt.PreparedMatmul(a.device, product).offered_tiles():
        with patch.object(cublas_lt, "preferred_tile", return_value=tile):
            matmul = cublas_lt.PreparedMatmul(a.device, product)
        yield tile, partial(_run, matmul, a, b, one)


def _run(matmul: cublas_lt.PreparedMatmul, a: Tensor, b: Tensor, one: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[0], dtype=BF16)
    matmul.run(out, a, b, (one, one))
    return out


def measured(cases: list[tuple[ProductTime, Call]], rounds: int, device: torch.device) -> list[ProductTime]:
    timed = [Timed(f"{row.product} by {row.path}", [call], device) for row, call in cases]
    measure(timed, rounds, "products")
    rows = [row.timed(one.us) for (row, _), one in zip(cases, timed, strict=True)]
    peer = {row.product: row.us for row in rows if row.path == TORCH}
    return [replace(row, speed=peer[row.product] / row.us) for row in rows]


def show(rows: list[ProductTime]) -> None:
    table = Table(title="FP8 GEMMs: TFLOP/s, and speed relative to PyTorch's", title_justify="left", box=None)
    for name in ("layer", "direction", "tokens"):
        table.add_column(name, no_wrap=True)
    for name in (TORCH, OURS, "speed", "fastest tile", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for ours in (row for row in rows if row.path == OURS):
        ways = {row.path: row for row in rows if row.product == ours.product}
        tiles = [row for path, row in ways.items() if path not in (OURS, TORCH)]
        best = max(tiles, key=lambda row: row.speed, default=None)
        table.add_row(
            *(ours.layer, ours.direction, str(ours.tokens)),
            *(f"{ways[TORCH].tflops:.0f}", f"[bold]{ours.tflops:.0f}[/]", f"{ours.speed:.3f}"),
            *(("", "") if best is None else (best.path.removeprefix("TILE_"), f"{best.speed:.3f}")),
        )
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)


def draw(rows: list[ProductTime], path: Path) -> None:
    """Draws a pair of bars for each GEMM."""
    ours = [row for row in rows if row.path == OURS]
    theirs = [row for row in rows if row.path == TORCH]
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(ours)), layout="constrained")
    axis = figure.subplots()
    for offset, found, color in ((-0.2, theirs, "#bab0ac"), (0.2, ours, "#4e79a7")):
        positions = [index + offset for index in range(len(found))]
        axis.barh(positions, [row.tflops for row in found], height=0.38, color=color, label=found[0].path)
        for position, row in zip(positions, found, strict=True):
            axis.text(row.tflops, position, f" {row.tflops:.0f}", va="center", fontsize=7)
    labels = [f"{row.layer}, {row.direction}, {row.tokens} tokens" for row in ours]
    axis.set_yticks(range(len(ours)), labels, fontsize=7)
    axis.set_ylim(len(ours) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("FP8 GEMMs with results in bf16, TFLOP/s", loc="left", fontsize=9)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


# -- the command -----------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="FP8 GEMMs of linear layers beside PyTorch's, and by every tile that cuBLASLt offers.",
    epilog="""Examples:

    python benchmarks/products.py

    python benchmarks/products.py --tokens 2048 --tokens 4096 --sweep --rounds 5

    python benchmarks/products.py --device cpu --json""",
)
def main(
    tokens: Annotated[list[int], typer.Option(min=1, help="Rows; repeat for several.")] = [8192],  # noqa: B006
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure all of cuBLASLt's tiles, too.")] = False,
    rounds: options.Rounds = 10,
    device: options.OneDevice = Device.cuda,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    kind = options.one_device(device)
    if sweep and (kind.type == "cpu" or cublas_lt.bindings() is None):
        raise typer.BadParameter("--sweep asks cuBLASLt on a GPU, through nvmath-python")
    torch.manual_seed(0)
    layers = {"tiny": (32, 64)} if kind.type == "cpu" else LAYERS
    cases = list(products(layers, [16] if kind.type == "cpu" else tokens, sweep, kind))
    rows = measured(cases, rounds, kind)
    payload: dict[str, Any] = {
        "environment": environment(kind.type),
        "rounds": rounds,
        "rows": [asdict(row) for row in rows],
    }
    publish(payload, out, "products", draw=partial(draw, rows), show=partial(show, rows), as_json=as_json)


if __name__ == "__main__":
    app()
