"""A norm of rows too wide for registers: a program reads its band of rows twice.

Statistics are those of merged blocks (Chan et al., 1979).
"""

from __future__ import annotations

import torch

from flatfsdp.kernels.norm.tensors import NormTensors, load_fp32, load_gain, load_summed
from flatfsdp.kernels.shared.outputs import record_amax, store_outputs
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


def wide_tile(dtype: torch.dtype, cols: int) -> Tile:
    """A band of rows, and the columns of it that are read at a time."""
    tile = find("wide_norm", dtype, cols)
    return tile._replace(cols=min(tile.cols, max(16, power_of_two(cols))))


@jit
def _wide_kernel(
    x_ptr,  # input [rows, COLS], FP32, fp16 or bf16
    residual_ptr,  # added to x first [rows, COLS], x's dtype, or None
    weight_ptr,  # [COLS], FP32, fp16 or bf16
    bias_ptr,  # [COLS], FP32, fp16 or bf16, or None
    summed_ptr,  # x + residual [rows, COLS], x's dtype; None without a residual
    mean_ptr,  # mean of each row [rows], FP32; None for RMSNorm, which subtracts none
    rstd_ptr,  # reciprocal standard deviation of each row [rows], FP32
    out_ptr,  # y [rows, COLS], x's dtype; None: not written, like the next two
    rowwise_ptr,  # y scaled [rows, COLS], FP8
    columnwise_ptr,  # its transpose [COLS, rows], FP8
    scale_ptr,  # scale of the FP8 outputs, one FP32 number, or None without them
    amax_ptr,  # raised to max |y|, one FP32 number, or None
    rows,
    eps,  # added to the variance
    COLS: tl.constexpr,  # columns of x
    ZERO_CENTERED: tl.constexpr,  # the gain is 1 + weight
    BLOCK_ROWS: tl.constexpr,  # rows of one program
    BLOCK_COLS: tl.constexpr,  # columns of them that are read at a time
    STAGES: tl.constexpr,  # such blocks on their way from memory at a time, in the first pass
):
    """Read a band of rows by blocks for statistics, then again backwards, because the cache holds the end."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < rows
    mean = tl.zeros([BLOCK_ROWS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, COLS, BLOCK_COLS, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = row_mask[:, None] & (col < COLS)[None, :]
        value = load_summed(
            x_ptr, residual_ptr, summed_ptr, row[:, None] * COLS + col[None, :], mask, "evict_last"
        )
        if mean_ptr is not None:
            count = tl.minimum(COLS - start, BLOCK_COLS).to(tl.float32)
            block_mean = tl.sum(value, axis=1) / count
            value = tl.where(mask, value - block_mean[:, None], 0.0)
            difference = block_mean - mean
            share = count / (start + count)
            mean += difference * share
            squares += difference * difference * share * start
        squares += tl.sum(value * value, axis=1)
    rstd = tl.rsqrt(squares / COLS + eps)
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
        value = load_fp32(again_ptr + row[:, None] * COLS + col[None, :], mask, "evict_first")
        value = (value - mean[:, None]) * rstd[:, None]
        value *= load_gain(weight_ptr, col, col_mask, ZERO_CENTERED)[None, :]
        if bias_ptr is not None:
            value += load_fp32(bias_ptr + col, col_mask, "evict_last")[None, :]
        if amax_ptr is not None:
            inside = tl.where(mask, tl.abs(value), 0.0)
            largest = tl.maximum(largest, inside, propagate_nan=tl.PropagateNan.ALL)
        store_outputs(value, row, col, rows, COLS, mask, out_ptr, rowwise_ptr, columnwise_ptr, scale_ptr)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


def launch(tensors: NormTensors, eps: float, zero_centered: bool) -> None:
    rows, cols = tensors.x.shape
    _prepared(rows, eps, cols, zero_centered, wide_tile(tensors.x.dtype, cols))(*tensors)


@for_each_shape
def _prepared(rows: int, eps: float, cols: int, zero_centered: bool, tile: Tile) -> PreparedKernel:
    return PreparedKernel(
        _wide_kernel,
        (cdiv(rows, tile.rows),),
        *(rows, eps, cols, zero_centered, tile.rows, tile.cols, tile.stages),
        **tile.options,
    )
