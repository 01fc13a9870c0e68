"""LayerNorm and RMSNorm, with the addition of a residual before and the cast to FP8 after, in one kernel.

    summed = x + residual                          rounded to x's dtype: what later layers, and the norm, see
    mean = sum(summed) / n                         LayerNorm; RMSNorm subtracts nothing
    rstd = 1 / sqrt(sum((summed - mean)^2) / n + eps)
    y = (summed - mean) * rstd * weight + bias     1 + weight in place of weight if `zero_centered`

LayerNorm is by Ba et al. (2016), RMSNorm by Zhang and Sennrich (2019); `zero_centered` is Transformer
Engine's `zero_centered_gamma`.  Statistics are FP32, by two passes over a row or by merged blocks (Chan et
al., 1979), so that a large mean costs no digits.

Bytes per element of p bytes: p read, 2 p more with a residual, p written in high precision, 1 for each FP8
form.

Without a columnwise output a program keeps whole rows in registers.  With one it owns a band of rows, high
enough for coalesced stores of the transpose, and reads it twice; the second pass goes backwards, so that it
finds what was read last in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import (
    HIGH_DTYPES,
    Tile,
    allocate_outputs,
    check_input,
    check_like,
    record_amax,
    store_outputs,
    write_outputs,
)
from flatfsdp.kernels._triton import cdiv, jit, on_device_of, tl
from torch import Tensor

WIDEST_ROW = 16384
"""Columns of the widest row that a program keeps in registers; wider ones go by bands."""


class NormForward(NamedTuple):
    """Results of `norm_forward`; None where not asked for."""

    out: Tensor | None
    rowwise: Tensor | None
    columnwise: Tensor | None
    summed: Tensor
    mean: Tensor | None
    rstd: Tensor


def row_tile(cols: int) -> Tile:
    """Whole rows, 32 elements per thread."""
    width = max(16, 1 << (cols - 1).bit_length())
    return Tile(max(1, 8192 // width), width, 16 if width > 8192 else 8)


def band_tile(rows: int, cols: int) -> Tile:
    """32 rows fill the 32-byte sectors of the transpose; fewer only to keep 132 multiprocessors busy.

    Registers let one program run on each, so that the bands being read are 132 * 32 * cols elements.
    """
    return Tile(32 if rows > 132 * 16 else 16, min(256, max(16, 1 << (cols - 1).bit_length())), 16)


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    value = x.float()
    if residual is not None and summed is not None:
        value = summed.copy_(value + residual.float()).float()
    if mean is not None:
        mean.copy_(value.mean(1))
        value = value - mean[:, None]
    rstd.copy_(1 / torch.sqrt(value.square().mean(1) + eps))
    gain = weight.float() + 1 if zero_centered else weight.float()
    value = value * rstd[:, None] * gain
    if bias is not None:
        value = value + bias.float()
    write_outputs(value, out, rowwise, columnwise, scale, amax)


@jit
def _load_summed(x_ptr, residual_ptr, summed_ptr, index, mask):
    """x, or x + residual rounded to x's dtype and stored; as FP32."""
    x = tl.load(x_ptr + index, mask, 0.0)
    if residual_ptr is not None:
        total = x.to(tl.float32) + tl.load(residual_ptr + index, mask, 0.0).to(tl.float32)
        x = total.to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + index, x, mask)
    return x.to(tl.float32)


@jit
def _scale_and_shift(value, weight_ptr, bias_ptr, col, col_mask, ZERO_CENTERED: tl.constexpr):
    weight = tl.load(weight_ptr + col, col_mask, 0.0, eviction_policy="evict_last").to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    value *= weight[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, col_mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        value += bias[None, :]
    return value


@jit
def _row_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    out_ptr,
    rowwise_ptr,
    columnwise_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    eps,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = row < rows, col < COLS
    mask = row_mask[:, None] & col_mask[None, :]
    value = _load_summed(x_ptr, residual_ptr, summed_ptr, row[:, None] * COLS + col[None, :], mask)
    if mean_ptr is not None:
        mean = tl.sum(value, axis=1) / COLS
        tl.store(mean_ptr + row, mean, row_mask)
        value = tl.where(mask, value - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / COLS + eps)
    tl.store(rstd_ptr + row, rstd, row_mask)
    value = _scale_and_shift(value * rstd[:, None], weight_ptr, bias_ptr, col, col_mask, ZERO_CENTERED)
    if amax_ptr is not None:
        record_amax(amax_ptr, tl.where(mask, value, 0.0))
    store_outputs(value, row, col, rows, COLS, mask, out_ptr, rowwise_ptr, columnwise_ptr, scale_ptr)


@jit
def _band_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    out_ptr,
    rowwise_ptr,
    columnwise_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    eps,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < rows
    mean = tl.zeros([BLOCK_ROWS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, COLS, BLOCK_COLS, num_stages=3):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = row_mask[:, None] & (col < COLS)[None, :]
        value = _load_summed(x_ptr, residual_ptr, summed_ptr, row[:, None] * COLS + col[None, :], mask)
        if mean_ptr is not None:
            count = tl.minimum(COLS - start, BLOCK_COLS).to(tl.float32)
            block_mean = tl.sum(value, axis=1) / count
            value = tl.where(mask, value - block_mean[:, None], 0.0)
            difference = block_mean - mean
            share = count / (start + count)
            mean += difference * share
            squares += difference * difference * share * start
        squares += tl.sum(value * value, axis=1)
    rstd = 1.0 / tl.sqrt_rn(squares / COLS + eps)
    tl.store(rstd_ptr + row, rstd, row_mask)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, row_mask)

    tl.debug_barrier()  # the stores of `summed` by other threads of this program
    again_ptr = x_ptr if residual_ptr is None else summed_ptr
    blocks: tl.constexpr = (COLS + BLOCK_COLS - 1) // BLOCK_COLS
    largest = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for done in tl.range(0, blocks, num_stages=2):
        col = (blocks - 1 - done) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        col_mask = col < COLS
        mask = row_mask[:, None] & col_mask[None, :]
        value = tl.load(again_ptr + row[:, None] * COLS + col[None, :], mask, 0.0).to(tl.float32)
        value = (value - mean[:, None]) * rstd[:, None]
        value = _scale_and_shift(value, weight_ptr, bias_ptr, col, col_mask, ZERO_CENTERED)
        if amax_ptr is not None:
            magnitude = tl.where(mask, tl.abs(value), 0.0)
            largest = tl.maximum(largest, magnitude, propagate_nan=tl.PropagateNan.ALL)
        store_outputs(value, row, col, rows, COLS, mask, out_ptr, rowwise_ptr, columnwise_ptr, scale_ptr)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    rows, cols = x.shape
    by_band = columnwise is not None or cols > WIDEST_ROW
    kernel, tile = (_band_kernel, band_tile(rows, cols)) if by_band else (_row_kernel, row_tile(cols))
    tensors = (x, residual, weight, bias, summed, mean, rstd, out, rowwise, columnwise, scale, amax)
    with on_device_of(x):
        kernel[(cdiv(rows, tile.rows),)](
            *tensors, rows, eps, cols, zero_centered, tile.rows, tile.cols, num_warps=tile.warps
        )


_norm_forward = operator(
    "norm_forward_(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor(a!)? summed, "
    "Tensor(b!)? mean, Tensor(c!) rstd, Tensor(d!)? out, Tensor(e!)? rowwise, Tensor(f!)? columnwise, "
    "Tensor? scale, Tensor(g!)? amax, float eps, bool zero_centered) -> ()",
    reference=reference,
    launch=launch,
)


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    high_precision: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
) -> NormForward:
    """Normalizes the rows of x, or of x + residual.

    Args:
        x: [rows, cols], FP32, FP16 or bf16, contiguous; so is `residual`, of x's dtype.
        weight, bias: [cols] in any of these dtypes; bias may be None.
        rms: RMSNorm, which has no bias, in place of LayerNorm.
        zero_centered: the gain is 1 + weight.
        scale: FP32, one element: what values are multiplied by before the cast to FP8.
        amax: FP32, one element, becomes max(amax, max |y|) of the FP32 result, unscaled.
        dtype: float8_e4m3fn or float8_e5m2, for the outputs that `rowwise` and `columnwise` ask for.
        high_precision: whether y is wanted in x's dtype.

    Returns:
        `out` [rows, cols] in x's dtype, `rowwise` [rows, cols] and `columnwise` [cols, rows] in FP8; `summed`
        in x's dtype (x itself without a residual); `mean` (None if `rms`) and `rstd`, FP32 [rows].

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    rows, cols = x.shape
    if rms and bias is not None:
        raise ValueError("RMSNorm has no bias: pass bias=None, or rms=False for LayerNorm")
    check_like("residual", residual, x, (rows, cols), x.dtype)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_like(name, tensor, x, (cols,), tensor.dtype if tensor.dtype in HIGH_DTYPES else x.dtype)
    outputs = allocate_outputs(
        x,
        cols,
        scale=scale,
        amax=amax,
        dtype=dtype,
        high_precision=high_precision,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    summed = None if residual is None else torch.empty_like(x)
    mean = None if rms else x.new_empty(rows, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    _norm_forward(
        x, residual, weight, bias, summed, mean, rstd, *outputs, scale, amax, eps, zero_centered
    )  # fmt: skip
    if summed is None:
        summed = x
    return NormForward(outputs.out, outputs.rowwise, outputs.columnwise, summed, mean, rstd)
