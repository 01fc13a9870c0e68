"""Gradients of LayerNorm and RMSNorm; x is what was normalized (the sum, if a residual was added).

    z = (x - mean) * rstd,  g = dy * weight        1 + weight in place of weight if `zero_centered`
    dx = (g - z * sum(g * z) / n - sum(g) / n) * rstd + d_residual      the second sum in LayerNorm only
    dweight = sum of dy * z over rows,  dbias = sum of dy over rows

`d_residual` is the gradient that reaches the sum from elsewhere; it is added before dx is rounded.

Bytes per element of p bytes: 2 p read, p more with `d_residual`, p written.  Rows of more than 8192 elements
need another 2 p: their weight gradients do not fit into registers beside dx and have a separate kernel.

Weight gradients are summed in FP32 and deterministically: each program sums its own rows, and `sum_bands`
adds up the programs.  The number of programs depends on the shape only.

Arguments shared by both kernels:

    dy_ptr, x_ptr             gradient of the result, and x [rows, COLS], of one dtype, FP32, fp16 or bf16
    mean_ptr, rstd_ptr        statistics of each row [rows], FP32; no mean (None) for RMSNorm
    dweight_ptr, dbias_ptr    sums of each program [programs, COLS], FP32; None: not wanted
    rows_per_program          rows that one program takes, a multiple of BLOCK_ROWS
    COLS                      columns of x
    STAGES                    tiles on their way from memory at a time
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import HIGH_DTYPES, check_input, check_like, new_bands, sum_bands
from flatfsdp.kernels.shared.tiles import MULTIPROCESSORS, Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

WIDEST_FUSED = 8192
"""Largest number of columns for which one kernel computes dx and the weight gradients."""
SHARED_MEMORY = 227 << 10
"""Bytes of shared memory available to a program on Hopper."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
SUM_PROGRAMS = 16
"""Number of bands of rows for the separate kernel of weight gradients."""


class NormBackward(NamedTuple):
    """Results of `norm_backward`."""

    dx: Tensor
    """[rows, cols] in x's dtype."""
    dweight: Tensor
    """[cols] in the weight's dtype."""
    dbias: Tensor | None
    """[cols] in the weight's dtype; None for RMSNorm."""


def row_tile(dtype: torch.dtype, cols: int) -> Tile:
    """A tile of whole rows; several at a time if they are narrow."""
    return _of_whole_rows(find("norm_backward", dtype, cols), dtype, cols)


@for_each_shape
def _of_whole_rows(tile: Tile, dtype: torch.dtype, cols: int) -> Tile:
    width = max(16, power_of_two(cols))
    rows = max(1, tile.rows * tile.cols // width)
    # Shared memory holds dy, x and the residual's gradient of every stage.
    fitting = SHARED_MEMORY // (3 * rows * width * dtype.itemsize)
    return tile._replace(rows=rows, cols=width, stages=max(1, min(tile.stages, fitting)))


def programs_of(tile: Tile) -> int:
    """Number of programs that run at once, with at most 128 registers per thread."""
    return MULTIPROCESSORS * max(1, REGISTERS // (32 * tile.warps * (tile.registers or 128)))


def reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    d_residual: Tensor | None,
    dx: Tensor,
    weight_grads: Tensor,
    zero_centered: bool,
) -> None:
    grad, value = dy.float(), x.float()
    if mean is not None:
        value = value - mean[:, None]
    value = value * rstd[:, None]
    sums = weight_grads.view(-1, x.shape[1])
    sums[0] = (grad * value).sum(0)
    if mean is not None:
        sums[1] = grad.sum(0)
    grad = grad * (weight.float() + 1 if zero_centered else weight.float())
    result = grad - value * (grad * value).mean(1, keepdim=True)
    if mean is not None:
        result = result - grad.mean(1, keepdim=True)
    result = result * rstd[:, None]
    dx.copy_(result if d_residual is None else result + d_residual.float())


@jit
def _normalized(x_ptr, mean_ptr, rstd, row, row_mask, index, mask):
    """Compute a tile of z, FP32; masked elements are arbitrary, as their gradients are 0."""
    value = tl.load(x_ptr + index, mask, 0.0).to(tl.float32)
    if mean_ptr is not None:
        value -= tl.load(mean_ptr + row, row_mask, 0.0)[:, None]
    return value * rstd[:, None]


@jit
def _sums(first, second):
    """Sum each row of two tiles, with one exchange between threads instead of two."""
    return tl.split(tl.sum(tl.join(first, second), axis=1))


@jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,  # [COLS], FP32, fp16 or bf16
    mean_ptr,
    rstd_ptr,
    d_residual_ptr,  # gradient to add to dx [rows, COLS], x's dtype, or None
    dx_ptr,  # gradient of x [rows, COLS], x's dtype
    dweight_ptr,
    dbias_ptr,
    rows,
    rows_per_program,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,  # the gain is 1 + weight
    BLOCK_ROWS: tl.constexpr,  # rows of a tile
    BLOCK_COLS: tl.constexpr,  # its columns: COLS, rounded up to a power of two
    STAGES: tl.constexpr,
):
    """Compute dx of some rows, and their share of the weight gradients unless `dweight_ptr` is None."""
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_COLS)
    col_mask = col < COLS
    weight = tl.load(weight_ptr + col, col_mask, 0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in tl.range(first, last, BLOCK_ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        row_mask = row < last
        mask = row_mask[:, None] & col_mask[None, :]
        index = row[:, None] * COLS + col[None, :]
        rstd = tl.load(rstd_ptr + row, row_mask, 0.0)
        grad = tl.load(dy_ptr + index, mask, 0.0).to(tl.float32)
        value = _normalized(x_ptr, mean_ptr, rstd, row, row_mask, index, mask)
        if dweight_ptr is not None:
            dweight += grad * value
        if dbias_ptr is not None:
            dbias += grad
        grad *= weight[None, :]
        if mean_ptr is not None:
            along, total = _sums(grad * value, grad)
            result = grad - value * (along / COLS)[:, None] - (total / COLS)[:, None]
        else:
            result = grad - value * (tl.sum(grad * value, axis=1) / COLS)[:, None]
        result *= rstd[:, None]
        if d_residual_ptr is not None:
            result += tl.load(d_residual_ptr + index, mask, 0.0).to(tl.float32)
        tl.store(dx_ptr + index, result.to(dx_ptr.dtype.element_ty), mask)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program * COLS + col, tl.sum(dweight, axis=0), col_mask)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program * COLS + col, tl.sum(dbias, axis=0), col_mask)


@jit
def _weight_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    rows_per_program,
    COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of a tile
    BLOCK_COLS: tl.constexpr,  # its columns, which one program takes
    STAGES: tl.constexpr,
):
    """Compute the share of some rows in the weight gradients of some columns."""
    program = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = col < COLS
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    first = program * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in tl.range(first, last, BLOCK_ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        row_mask = row < last
        mask = row_mask[:, None] & col_mask[None, :]
        index = row[:, None] * COLS + col[None, :]
        rstd = tl.load(rstd_ptr + row, row_mask, 0.0)
        grad = tl.load(dy_ptr + index, mask, 0.0).to(tl.float32)
        dweight += grad * _normalized(x_ptr, mean_ptr, rstd, row, row_mask, index, mask)
        if dbias_ptr is not None:
            dbias += grad
    tl.store(dweight_ptr + program * COLS + col, tl.sum(dweight, axis=0), col_mask)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program * COLS + col, tl.sum(dbias, axis=0), col_mask)


def launch(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    d_residual: Tensor | None,
    dx: Tensor,
    weight_grads: Tensor,
    zero_centered: bool,
) -> None:
    rows, cols = x.shape
    tile = row_tile(x.dtype, cols)
    is_fused = cols <= WIDEST_FUSED
    of_sums = find("norm_backward, sum", x.dtype, cols)
    rows_each, sum_rows, n = _division(rows, tile, None if is_fused else of_sums)
    bands = new_bands(weight_grads, n)
    dweight, dbias = (bands, None) if mean is None else bands.unbind()
    inside = (dweight, dbias) if is_fused else (None, None)
    start = _prepared_backward(rows, rows_each, cols, zero_centered, tile)
    start(dy, x, weight, mean, rstd, d_residual, dx, *inside)
    if not is_fused:
        _prepared_weight(rows, sum_rows, cols, of_sums)(dy, x, mean, rstd, dweight, dbias)
    sum_bands(bands, weight_grads)


@for_each_shape
def _prepared_backward(
    rows: int, rows_each: int, cols: int, zero_centered: bool, tile: Tile
) -> PreparedKernel:
    return PreparedKernel(
        _backward_kernel,
        (cdiv(rows, rows_each),),
        *(rows, rows_each, cols, zero_centered, tile.rows, tile.cols, tile.stages),
        **tile.options,
    )


@for_each_shape
def _prepared_weight(rows: int, rows_each: int, cols: int, tile: Tile) -> PreparedKernel:
    return PreparedKernel(
        _weight_kernel,
        (cdiv(cols, tile.cols), cdiv(rows, rows_each)),
        *(rows, rows_each, cols, tile.rows, tile.cols, tile.stages),
        **tile.options,
    )


@for_each_shape
def _division(rows: int, tile: Tile, of_sums: Tile | None) -> tuple[int, int, int]:
    """Rows of one program, rows that are summed together, and the number of such bands.

    Args:
        rows: number of all rows.
        tile: tile of dx.
        of_sums: tile of the separate kernel of weight gradients; None: there is none.
    """
    rows_each = _rows_each(rows, tile.rows, programs_of(tile))
    sum_rows = rows_each if of_sums is None else _rows_each(rows, of_sums.rows, SUM_PROGRAMS)
    return rows_each, sum_rows, cdiv(rows, sum_rows)


def _rows_each(rows: int, block: int, programs: int) -> int:
    """Number of rows of one program, in whole blocks, for at most `programs` programs."""
    return block * max(1, cdiv(rows, block * programs))


_norm_backward = operator(
    "norm_backward_(Tensor dy, Tensor x, Tensor weight, Tensor? mean, Tensor rstd, Tensor? d_residual, "
    "Tensor(a!) dx, Tensor(b!) weight_grads, bool zero_centered) -> ()",
    reference=reference,
    launch=launch,
)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    rms: bool,
    zero_centered: bool = False,
    d_residual: Tensor | None = None,
) -> NormBackward:
    """Compute the gradients of `norm_forward`.

    Args:
        dy: [rows, cols], gradient of the result, in x's dtype.
        x: `NormForward.summed`, [rows, cols], FP32, FP16 or bf16.
        weight: [cols].
        mean: FP32 [rows], from the forward; None if `rms`.
        rstd: FP32 [rows], from the forward.
        rms: RMSNorm instead of LayerNorm.
        zero_centered: the gain is 1 + weight.
        d_residual: [rows, cols] in x's dtype, a gradient that reaches x by other ways; added to dx.

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    rows, cols = x.shape
    if rms != (mean is None):
        raise ValueError("mean must be None for RMSNorm, and that of the forward for LayerNorm")
    for name, tensor in (("dy", dy), ("d_residual", d_residual)):
        check_like(name, tensor, x, (rows, cols), x.dtype)
    if mean is not None:
        check_like("mean", mean, x, (rows,), torch.float32)
    check_like("rstd", rstd, x, (rows,), torch.float32)
    check_like("weight", weight, x, (cols,), weight.dtype if weight.dtype in HIGH_DTYPES else x.dtype)
    dx = torch.empty_like(x)
    shape = (cols,) if rms else (2, cols)
    weight_grads = x.new_empty(shape, dtype=weight.dtype)
    _norm_backward(dy, x, weight, mean, rstd, d_residual, dx, weight_grads, zero_centered)
    dweight, dbias = (weight_grads, None) if rms else weight_grads.unbind()
    return NormBackward(dx, dweight, dbias)
