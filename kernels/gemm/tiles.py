"""Tiles of a GEMM's result that are faster on an H200 than cuBLASLt's first choice.

These are fixed rules without autotuning at run time, so that every run and every rank adds in the same
order.  They come from timing all algorithms of cuBLASLt (`benchmarks/products.py --sweep`; figures in
benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatfsdp.kernels.shared.tiles import MULTIPROCESSORS
from flatfsdp.kernels.shared.triton import cdiv

if TYPE_CHECKING:
    from flatfsdp.kernels.gemm.cublas_lt import Product

FIRST_CHOICE = (256, 128)
FORWARD = {FIRST_CHOICE: 1.0, (176, 128): 1.03, (168, 128): 1.03, (128, 160): 1.02}
"""Columns and rows of a tile -> speed of FP8 GEMMs with fast accumulation, relative to the first choice."""
LONG_SUMS = FORWARD | {(128, 160): 1.0}
"""Speeds for sums over more than 4096, in which a small tile reads more for each result."""


def preferred_tile(product: Product) -> str | None:
    """The name in cuBLASLt of the preferred tile; None leaves the choice to cuBLASLt."""
    if product.sums_once:
        return _of_weight_gradient(product)
    # With split accumulators the first choice is within 2 % of the best.
    if product.is_fp8 and not product.split_accumulator and product.rows >= 2048:
        return _of_forward(product)
    return None


def _of_forward(product: Product) -> str | None:
    """The tile that finishes its waves over all multiprocessors first, if it is not the usual first choice.

    Over 44 GEMMs of layers, 2048 to 16384 tokens, it takes 90 to 100 % of PyTorch's time, 97 % on average,
    and 0.4 % more than the best tile of each.
    """
    speeds = FORWARD if product.inner <= 4096 else LONG_SUMS

    def time(tile: tuple[int, int]) -> float:
        cols, rows = tile
        tiles = cdiv(product.cols, cols) * cdiv(product.rows, rows)
        return cdiv(tiles, MULTIPROCESSORS) * cols * rows / speeds[tile]

    best = min(speeds, key=time)
    return None if best == FIRST_CHOICE else f"TILE_{best[0]}x{best[1]}"


def _of_weight_gradient(product: Product) -> str | None:
    """The tile measured for FP32 results with beta = 1, over shapes of layers and 1024 to 8192 tokens.

    Results in bf16 take it, too.

    cuBLASLt does not account for the FP32 reads and writes of the epilogue, nor for the clock that a GPU
    sustains.  In 16 bits, 128 x 160 takes 1 to 9 % less time at 8192 tokens and 20 to 28 % less at 1024; in
    FP8 the first choice is within 2 % of the best, except for few tokens, where 128 x 128 takes 4 to 13 %
    less.
    """
    size = product.rows * product.cols
    if size < 1 << 22 or (product.is_fp8 and product.inner > 1024):
        return None
    return "TILE_128x128" if product.is_fp8 or size < 1 << 25 else "TILE_128x160"
