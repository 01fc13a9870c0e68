"""Sums over the rows of a matrix, such as the gradient of a bias.

    out = sum over rows of float(x)          added up in FP32

A program sums a slab of columns from the first row to the last, so nothing remains to be added.  Only if this
gives fewer than `PROGRAMS` programs, each slab is split into bands of rows, which `sum_bands` adds.  The
order of additions depends on the shape alone, so results are bit-equal in every run.

Bytes per element, x of p bytes: p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import check_input, fold, new_bands, rows_at_once, sum_bands, vector_of
from flatfsdp.kernels.shared.tiles import Tile, find
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

PROGRAMS = 128
"""Number of programs that saturates the memory bandwidth."""


def division(rows: int, cols: int, tile: Tile) -> tuple[int, int]:
    """Number of bands that a slab of columns is split into, at least one, and of tiles in a band."""
    tiles, slabs = cdiv(rows, tile.rows), max(1, cdiv(cols, tile.cols))
    steps = max(1, cdiv(tiles, max(1, PROGRAMS // slabs)))
    return max(1, cdiv(tiles, steps)), steps


def reference(x: Tensor, out: Tensor) -> None:
    out.copy_(torch.sum(x, 0, dtype=torch.float32))


@jit
def _column_sum_kernel(
    x_ptr,  # input [rows, cols], FP32, fp16 or bf16
    out_ptr,  # sums of each band [bands, cols]: FP32, or the result's dtype if there is one band
    rows,
    cols,
    steps,  # tiles in a band, which one program sums
    BLOCK_ROWS: tl.constexpr,  # size of a tile
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,  # tiles on their way from memory at a time
    SUM_ROWS: tl.constexpr,  # rows of partial sums, as by `fold`
):
    """Sum one band of a slab of columns."""
    band = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = col < cols
    sums = tl.zeros([SUM_ROWS, BLOCK_COLS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (band * steps + step) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + row[:, None] * cols + col[None, :], mask, 0.0)
        sums += fold(x.to(tl.float32), SUM_ROWS)
    tl.store(out_ptr + band * cols + col, tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty), col_mask)


@for_each_shape
def _prepared(rows: int, cols: int, bands: int, steps: int, tile: Tile, vector: int) -> PreparedKernel:
    return PreparedKernel(
        _column_sum_kernel,
        (cdiv(cols, tile.cols), bands),
        *(rows, cols, steps, tile.rows, tile.cols, tile.stages, rows_at_once(tile, vector)),
        **tile.options,
    )


def launch(x: Tensor, out: Tensor) -> None:
    rows, cols = x.shape
    tile = find("column_sum", x.dtype, cols)
    bands, steps = division(rows, cols, tile)
    sums = out if bands == 1 else new_bands(out, bands)
    _prepared(rows, cols, bands, steps, tile, vector_of(x))(x, sums)
    if bands > 1:
        sum_bands(sums, out)


_column_sum = operator("column_sum_(Tensor x, Tensor(a!) out) -> ()", reference=reference, launch=launch)


def column_sum(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums over rows, [cols]; 0 if there are no rows.

    Args:
        x: bf16, fp16 or FP32 [rows, cols], contiguous.
        dtype: dtype of the result, which is rounded once.

    Raises:
        ValueError: if a shape, dtype or device does not fit.
    """
    check_input("x", x)
    out = x.new_empty(x.shape[1], dtype=dtype)
    _column_sum(x, out)
    return out
