"""Casts to FP8 in one pass: both layouts of the GEMM, the amax, and column sums for the bias gradient.

    q          = clamp(float(x) * scale, -max, max) to FP8, round to nearest even; NaN stays NaN
    rowwise    = q                  [rows, cols]
    columnwise = q transposed       [cols, rows]; Hopper's FP8 GEMMs read operands along K only
    amax       = max(amax, max |x|) before scaling; NaN wins
    column_sum = sum over rows of float(x)

Bytes per element, x of p bytes: p + 1 for each layout; column sums add 8 for each band of rows, the height of
a tile.  The amax is a maximum of integers (the bits of |x|), which no order of programs changes.

The outputs are those of Transformer Engine's cast + transpose + dbias.

`max_abs` is the amax alone, for scales that are computed from the tensor itself: p bytes per element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import (
    FP8_DTYPES,
    check_input,
    check_scalar,
    check_scalars,
    new_bands,
    record_amax,
    starts_early,
    sum_bands,
    write_outputs,
)
from flatfsdp.kernels.shared.pairs import (
    WHOLE_ROWS,
    larger_magnitude,
    read_row_pairs,
    store_column_sums,
    store_pairs,
    to_fp32,
)
from flatfsdp.kernels.shared.tiles import Tile, find
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


class Cast(NamedTuple):
    """Results of `cast`; None where not requested."""

    rowwise: Tensor | None
    """FP8 [rows, cols]."""
    columnwise: Tensor | None
    """FP8 [cols, rows]."""
    column_sum: Tensor | None
    """[cols]."""


def reference(
    x: Tensor,
    scale: Tensor,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    amax: Tensor | None,
    column_sum: Tensor | None,
) -> None:
    values = x.float()
    write_outputs(values, None, rowwise, columnwise, scale, amax)
    if column_sum is not None:
        column_sum.copy_(values.sum(0))


@jit
def _cast_kernel(
    x_ptr,  # input [rows, cols], FP32, fp16 or bf16
    scale_ptr,  # what x is multiplied by, one FP32 number
    rowwise_ptr,  # q [rows, cols], FP8; None: not written, like the next three
    columnwise_ptr,  # q transposed [cols, rows], FP8
    amax_ptr,  # raised to max |x|, one FP32 number
    band_sums_ptr,  # sums over the rows of each tile [ceil(rows / (2 * PAIRS)), cols], FP32
    rows,
    cols,
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
    WHOLE: tl.constexpr,  # rows are a multiple of WHOLE_ROWS: write the transpose in wide stores
    PAIRS: tl.constexpr,  # half the rows of a tile, which one program takes
    BLOCK_COLS: tl.constexpr,  # columns of a tile
):
    """Cast one tile, and sum its columns."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    across = tl.cdiv(cols, BLOCK_COLS)
    band = (tl.program_id(0) // across).to(tl.int64)
    row = band * (2 * PAIRS)
    col = (tl.program_id(0) % across) * BLOCK_COLS
    rows_left, cols_left = (rows - row).to(tl.int32), cols - col
    upper, lower = read_row_pairs(x_ptr + row * cols + col, cols, rows_left, cols_left, PAIRS, BLOCK_COLS)
    if band_sums_ptr is not None:
        store_column_sums(upper, lower, band_sums_ptr + band * cols + col, cols_left)
    upper = to_fp32(upper)
    lower = to_fp32(lower)
    if amax_ptr is not None:
        record_amax(amax_ptr, larger_magnitude(upper, lower))
    store_pairs(
        *(upper, lower, row, col, rows, cols, rows_left, cols_left),
        *(None, rowwise_ptr, columnwise_ptr, tl.load(scale_ptr), WHOLE),
    )


@for_each_shape
def _prepared_cast(rows: int, cols: int, tile: Tile, is_early: bool) -> PreparedKernel:
    return PreparedKernel(
        _cast_kernel,
        (cdiv(rows, tile.rows) * cdiv(cols, tile.cols),),
        *(rows, cols, is_early, rows % WHOLE_ROWS == 0, tile.rows // 2, tile.cols),
        **tile.options,
        launch_pdl=is_early,
    )


def launch(
    x: Tensor,
    scale: Tensor,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    amax: Tensor | None,
    column_sum: Tensor | None,
) -> None:
    rows, cols = x.shape
    tile = find("cast" if column_sum is None else "cast, sum", x.dtype, cols)
    band_sums = None if column_sum is None else new_bands(column_sum, cdiv(rows, tile.rows))
    start = _prepared_cast(rows, cols, tile, starts_early(x.device))
    start(x, scale, rowwise, columnwise, amax, band_sums)
    if band_sums is not None and column_sum is not None:
        sum_bands(band_sums, column_sum)


_cast = operator(
    "cast_(Tensor x, Tensor scale, Tensor(a!)? rowwise, Tensor(b!)? columnwise, Tensor(c!)? amax, "
    "Tensor(d!)? column_sum) -> ()",
    reference=reference,
    launch=launch,
)


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    column_sum: torch.dtype | None = None,
) -> Cast:
    """Cast `x` to FP8, in the layouts that the following GEMMs read.

    Args:
        x: bf16, fp16 or FP32 [rows, cols], contiguous.
        scale: FP32, one element, on x's device; the GEMM has to divide by it.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        amax: FP32, one element, never negative; raised in place to max |x| if that is larger.
        rowwise: whether to return q [rows, cols].
        columnwise: whether to return q transposed [cols, rows].
        column_sum: dtype of the sums over rows, [cols], of x before scaling; None: not returned.

    Raises:
        ValueError: if a shape or dtype does not fit, or neither layout is requested.
    """
    check_input("x", x)
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}; cast makes torch.float8_e4m3fn or torch.float8_e5m2")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False; ask cast for at least one layout")
    check_scalars(x, ("scale", scale), ("amax", amax))
    rows, cols = x.shape
    result = Cast(
        x.new_empty(rows, cols, dtype=dtype) if rowwise else None,
        x.new_empty(cols, rows, dtype=dtype) if columnwise else None,
        None if column_sum is None else x.new_empty(cols, dtype=column_sum),
    )
    _cast(x, scale, result.rowwise, result.columnwise, amax, result.column_sum)
    return result


def max_abs_reference(x: Tensor, amax: Tensor) -> None:
    write_outputs(x.float(), None, None, None, None, amax)


@jit
def _max_abs_kernel(
    x_ptr,  # input [numel], FP32, fp16 or bf16
    amax_ptr,  # raised to max |x|, one FP32 number
    numel,
    BLOCK: tl.constexpr,  # elements of one program
):
    """Raise the amax by one block of x."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    record_amax(amax_ptr, tl.load(x_ptr + index, index < numel, 0.0).to(tl.float32))


@for_each_shape
def _prepared_max_abs(numel: int, tile: Tile) -> PreparedKernel:
    return PreparedKernel(_max_abs_kernel, (cdiv(numel, tile.cols),), numel, tile.cols, **tile.options)


def max_abs_launch(x: Tensor, amax: Tensor) -> None:
    _prepared_max_abs(x.numel(), find("max_abs", x.dtype, x.shape[1]))(x, amax)


_max_abs = operator(
    "max_abs_(Tensor x, Tensor(a!) amax) -> ()", reference=max_abs_reference, launch=max_abs_launch
)


def max_abs(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Largest magnitude in `x`, FP32 [1]; 0 if x is empty, NaN if it contains NaN.

    Args:
        x: bf16, fp16 or FP32 [rows, cols], contiguous.
        out: FP32, one element, never negative; raised in place to max |x| if that is larger, and returned.

    Raises:
        ValueError: if a shape or dtype does not fit.
    """
    check_input("x", x)
    check_scalar("out", out, x)
    if out is None:
        out = x.new_zeros(1, dtype=torch.float32)
    _max_abs(x, out)
    return out
