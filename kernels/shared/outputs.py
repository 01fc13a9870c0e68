"""What fused kernels write: the result in the activations' dtype, in FP8, or both; and the amax of it.

Rowwise FP8 is [rows, cols]; columnwise FP8 is its transpose, [cols, rows] and contiguous, as Hopper's FP8
matrix products take K-major operands only.  Both hold the same bytes.  Cast and amax take the FP32 value,
before it is rounded to the activations' dtype, as in Transformer Engine's fused kernels:

    q = clamp(value * scale, -limit, limit) as FP8;  NaN stays NaN
    amax = max(amax, max |value|);  NaN wins

Sums over rows, which gradients of biases and norms are, are taken in two stages and always in the same order:
each program sums the band of rows that it works on, and `sum_bands` adds up the bands.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import Launch, cdiv, for_each_shape, jit, tl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HIGH_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Outputs(NamedTuple):
    """The three forms of one result; None where not asked for."""

    out: Tensor | None
    rowwise: Tensor | None
    columnwise: Tensor | None


def check_input(name: str, x: Tensor) -> None:
    """
    Raises:
        ValueError: if `x` is not a contiguous matrix, or is neither FP32, FP16 nor bf16.
    """
    if x.dim() != 2 or x.dtype not in HIGH_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}; it must be contiguous, "
            "2-dimensional, in FP32, FP16 or bf16"
        )


def check_like(
    name: str, tensor: Tensor | None, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """
    Raises:
        ValueError: if `tensor` is not contiguous, on x's device, and of this shape and dtype.
    """
    if tensor is None:
        return
    is_same = tensor.shape == shape and tensor.dtype == dtype and tensor.device == x.device
    if not is_same or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be contiguous, "
            f"{dtype} of shape {shape} on {x.device}"
        )


def check_scalar(name: str, tensor: Tensor | None, x: Tensor) -> None:
    """
    Raises:
        ValueError: if `tensor` is not one FP32 number on x's device.
    """
    if tensor is None:
        return
    if tensor.numel() != 1 or tensor.dtype != torch.float32 or tensor.device != x.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be one FP32 number "
            f"on {x.device}"
        )


def allocate_outputs(
    x: Tensor,
    cols: int,
    *,
    scale: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    high_precision: bool,
    rowwise: bool,
    columnwise: bool,
) -> Outputs:
    """Allocates what is asked for, for a result of [x.shape[0], cols].

    Args:
        scale: FP32, one element; needed with `dtype`.
        amax: FP32, one element, or None to record none.
        dtype: of the FP8 outputs; None for none, and then `rowwise` does not count.
        high_precision: whether the result is wanted in x's dtype, too.

    Raises:
        ValueError: if the options contradict each other.
    """
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
    if dtype is None and columnwise:
        raise ValueError("columnwise output is FP8 only: give a dtype, float8_e4m3fn or float8_e5m2")
    if dtype is not None and dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}; FP8 outputs are float8_e4m3fn or float8_e5m2")
    if dtype is not None and scale is None:
        raise ValueError(f"a cast to {dtype} needs a scale")
    rowwise = rowwise and dtype is not None
    if not (high_precision or rowwise or columnwise):
        raise ValueError("no output is asked for: set high_precision, or a dtype and rowwise or columnwise")
    rows = x.shape[0]
    return Outputs(
        x.new_empty(rows, cols) if high_precision else None,
        x.new_empty(rows, cols, dtype=dtype) if rowwise else None,
        x.new_empty(cols, rows, dtype=dtype) if columnwise else None,
    )


def write_outputs(
    value: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    """Plain PyTorch; `value` is FP32 [rows, cols]."""
    if amax is not None and value.numel():
        # torch.maximum and torch.amax keep NaN.
        amax.copy_(torch.maximum(amax, value.abs().amax()))
    if out is not None:
        out.copy_(value)
    fp8 = rowwise if rowwise is not None else columnwise
    if fp8 is None or scale is None:
        return
    limit = torch.finfo(fp8.dtype).max
    quantized = (value * scale).clamp(-limit, limit).to(fp8.dtype)
    if rowwise is not None:
        rowwise.copy_(quantized)
    if columnwise is not None:
        columnwise.copy_(quantized.T)


@jit
def saturate(value, DTYPE: tl.constexpr):
    """FP32 to FP8; NaN stays NaN."""
    limit: tl.constexpr = 57344.0 if DTYPE.is_fp8e5() else 448.0
    return tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@jit
def magnitude(value):
    """The bits of |value|: those of non-negative floats order like integers, with NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def raise_amax(amax_ptr, largest):
    """By a magnitude; an integer maximum does not depend on the order of programs."""
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), largest, sem="relaxed")


@jit
def record_amax(amax_ptr, value):
    """Masked elements of `value` must be 0."""
    raise_amax(amax_ptr, tl.max(magnitude(value)))


@jit
def store_outputs(value, row, col, rows, cols, mask, out_ptr, rowwise_ptr, columnwise_ptr, scale_ptr):
    """Stores an FP32 tile in each form whose pointer is not None; `row` are int64 indices."""
    index = row[:, None] * cols + col[None, :]
    if out_ptr is not None:
        tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask)
    if scale_ptr is not None:
        scaled = value * tl.load(scale_ptr)
        if rowwise_ptr is not None:
            tl.store(rowwise_ptr + index, saturate(scaled, rowwise_ptr.dtype.element_ty), mask)
        if columnwise_ptr is not None:
            # Without the clamp, which the GPU's conversion does itself, and by a conversion of its own: ptxas
            # (12.8, 12.9; Triton issue 11111) loses bytes of FP8 pairs that are both stored and transposed.
            turned = tl.trans(scaled.to(columnwise_ptr.dtype.element_ty))
            tl.store(columnwise_ptr + col[:, None].to(tl.int64) * rows + row[None, :], turned, tl.trans(mask))


@jit
def fold(value, ROWS: tl.constexpr):
    """Sums of every ROWS-th row of a tile, [ROWS, cols]; `rows_at_once` of them are in different threads."""
    return tl.sum(tl.reshape(value, [value.shape[0] // ROWS, ROWS, value.shape[1]]), axis=0)


def rows_at_once(tile: Tile, vector: int) -> int:
    """Rows of a tile that the threads of a program hold side by side, with `vector` elements each."""
    return min(tile.rows, max(1, 32 * tile.warps * vector // tile.cols))


def vector_of(x: Tensor, *others: Tensor | None) -> int:
    """Elements side by side in a thread: 16 bytes of the narrowest tensor."""
    return 16 // min(tensor.element_size() for tensor in (x, *others) if tensor is not None)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it still ends: on Hopper and later GPUs.

    It has to wait for the last writes (`gdc_wait`) before it reads what they wrote.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def _sum_bands_kernel(
    bands_ptr,
    out_ptr,
    bands,
    cols,
    IS_EARLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    matrix = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, bands, BLOCK_ROWS):
        band = start + tl.arange(0, BLOCK_ROWS)
        index = (matrix * bands + band)[:, None] * cols + col[None, :]
        total += tl.load(bands_ptr + index, (band < bands)[:, None] & (col < cols)[None, :], 0.0)
    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + matrix * cols + col, sums, col < cols)


def new_bands(out: Tensor, n: int) -> Tensor:
    """For the sums of n bands, which `sum_bands` will add up to `out`, [.., cols]: FP32 [.., n, cols]."""
    return out.new_empty(*out.shape[:-1], n, out.shape[-1], dtype=torch.float32)


def sum_bands(bands: Tensor, out: Tensor) -> None:
    """Sums FP32 [.., n, cols] over n into [.., cols] of any dtype, both contiguous."""
    n, cols = bands.shape[-2:]
    matrices, tile = out.numel() // cols if cols else 0, find("sum_bands", bands.dtype, cols)
    _sum_bands(matrices, n, cols, tile, starts_early(bands.device))(bands, out)


@for_each_shape
def _sum_bands(matrices: int, bands: int, cols: int, tile: Tile, is_early: bool) -> Launch:
    rows = min(tile.rows, power_of_two(bands))
    return Launch(
        _sum_bands_kernel,
        (cdiv(cols, tile.cols), matrices),
        *(bands, cols, is_early, rows, tile.cols),
        **tile.options,
        launch_pdl=is_early,
    )
