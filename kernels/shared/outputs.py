"""Outputs of fused kernels: the result in the activations' dtype, in FP8, or both; and its amax.

Rowwise FP8 is [rows, cols]; columnwise FP8 is its transpose, [cols, rows] and contiguous, because Hopper's
FP8 GEMMs take K-major operands only.  Both hold the same bytes.  Cast and amax use the FP32 value before it
is rounded to the activations' dtype, as in Transformer Engine's fused kernels:

    q = clamp(value * scale, -limit, limit) as FP8;  NaN stays NaN
    amax = max(amax, max |value|);  NaN wins

Sums over rows (gradients of biases and norms) are computed in two stages, always in the same order: each
program sums its own band of rows, and `sum_bands` adds up the bands.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
HIGH_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Outputs(NamedTuple):
    """The three forms of one result [rows, cols]; None where not requested."""

    out: Tensor | None
    """[rows, cols] in the activations' dtype."""
    rowwise: Tensor | None
    """FP8 [rows, cols]."""
    columnwise: Tensor | None
    """FP8 [cols, rows]."""


def check_input(name: str, x: Tensor) -> None:
    """Check an input of a kernel.

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
    """Check a tensor that goes with `x`; None passes.

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
    """Check a scale or an amax; None passes.

    Raises:
        ValueError: if `tensor` is not one FP32 number on x's device.
    """
    check_scalars(x, (name, tensor))


def check_scalars(x: Tensor, *named: tuple[str, Tensor | None]) -> None:
    """Check several scales and amaxes at once, as (name, tensor), like `check_scalar`."""
    device = x.device
    for name, tensor in named:
        if tensor is None or (
            tensor.numel() == 1 and tensor.dtype is torch.float32 and tensor.device == device
        ):
            continue
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it must be one FP32 number "
            f"on {device}"
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
    """Allocate the requested forms of a result [x.shape[0], cols].

    Args:
        x: the input, for the number of rows, dtype and device.
        cols: columns of the result.
        scale: FP32, one element; needed with `dtype`.
        amax: FP32, one element, or None to record none.
        dtype: dtype of the FP8 outputs, or None; `rowwise` is ignored then.
        high_precision: whether to allocate the result in x's dtype.
        rowwise: whether to allocate the result in FP8.
        columnwise: whether to allocate its transpose in FP8.

    Raises:
        ValueError: if the options contradict each other.
    """
    if scale is not None or amax is not None:
        check_scalars(x, ("scale", scale), ("amax", amax))
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
    """Write each form that is not None, in plain PyTorch; `value` is FP32 [rows, cols]."""
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
    """Cast FP32 to FP8, saturated at its largest number; NaN stays NaN."""
    limit: tl.constexpr = 57344.0 if DTYPE.is_fp8e5() else 448.0
    return tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@jit
def magnitude_bits(value):
    """The bits of |value|, FP32, as int32: ordered like the magnitudes, with NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def raise_amax(amax_ptr, largest):
    """Raise an FP32 amax to `largest`, from `magnitude_bits`.

    A maximum of integers does not depend on the order of programs.
    """
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), largest, sem="relaxed")


@jit
def record_amax(amax_ptr, value):
    """Raise an FP32 amax to max |value|, FP32; masked elements must be 0."""
    raise_amax(amax_ptr, tl.max(magnitude_bits(value)))


@jit
def store_outputs(
    value,  # tile, FP32
    row,  # indices of the tile's rows, int64
    col,  # indices of the tile's columns
    rows,  # size of the whole result
    cols,
    mask,  # elements of the tile that lie inside the result
    out_ptr,  # result [rows, cols], any dtype; None: not written, like the next two
    rowwise_ptr,  # scaled result [rows, cols], FP8
    columnwise_ptr,  # its transpose [cols, rows], FP8
    scale_ptr,  # scale of the FP8 forms, one FP32 number; None: neither is written
):
    """Store a tile in each form whose pointer is not None."""
    index = row[:, None] * cols + col[None, :]
    if out_ptr is not None:
        tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask)
    if scale_ptr is not None:
        scaled = value * tl.load(scale_ptr)
        if rowwise_ptr is not None:
            tl.store(rowwise_ptr + index, saturate(scaled, rowwise_ptr.dtype.element_ty), mask)
        if columnwise_ptr is not None:
            # Without the clamp, which the GPU's conversion includes, and converted separately: ptxas (12.8,
            # 12.9; Triton issue 11111) loses bytes of FP8 pairs that are both stored and transposed.
            transposed = tl.trans(scaled.to(columnwise_ptr.dtype.element_ty))
            at = columnwise_ptr + col[:, None].to(tl.int64) * rows + row[None, :]
            tl.store(at, transposed, tl.trans(mask))


@jit
def fold(value, ROWS: tl.constexpr):
    """Compute partial column sums of a tile, [ROWS, cols]: row r sums the tile's rows r, r + ROWS, and so on.

    With ROWS from `rows_at_once`, a thread sums what it holds, and no numbers are exchanged.
    """
    return tl.sum(tl.reshape(value, [value.shape[0] // ROWS, ROWS, value.shape[1]]), axis=0)


def rows_at_once(tile: Tile, vector: int) -> int:
    """Number of a tile's rows that a program's threads cover together, with `vector` neighbours each."""
    return min(tile.rows, max(1, 32 * tile.warps * vector // tile.cols))


def vector_of(x: Tensor, *others: Tensor | None) -> int:
    """Number of neighbouring elements that a thread holds: 16 bytes of the narrowest tensor."""
    return 16 // min(tensor.element_size() for tensor in (x, *others) if tensor is not None)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels use programmatic dependent launch (PDL), as on Hopper and later GPUs.

    A kernel is then launched (`launch_pdl`) before its predecessor has ended.  It has to wait for the last
    writes (`gdc_wait`) before it reads what they wrote; its constexpr for that is IS_EARLY.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def _sum_bands_kernel(
    bands_ptr,  # sums of each band [matrices, bands, cols], FP32
    out_ptr,  # sums over the bands [matrices, cols], any dtype
    bands,
    cols,
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
    BLOCK_ROWS: tl.constexpr,  # bands that are read at a time
    BLOCK_COLS: tl.constexpr,  # columns of one program
):
    """Add up all bands of some columns of one matrix."""
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
    """Allocate FP32 [.., n, cols] for the sums of n bands, which `sum_bands` adds up to `out` [.., cols]."""
    return out.new_empty(*out.shape[:-1], n, out.shape[-1], dtype=torch.float32)


def sum_bands(bands: Tensor, out: Tensor) -> None:
    """Sum FP32 [.., n, cols] over n into [.., cols] of any dtype, both contiguous."""
    n, cols = bands.shape[-2:]
    matrices, tile = out.numel() // cols if cols else 0, find("sum_bands", bands.dtype, cols)
    _prepared_sum(matrices, n, cols, tile, starts_early(bands.device))(bands, out)


@for_each_shape
def _prepared_sum(matrices: int, bands: int, cols: int, tile: Tile, is_early: bool) -> PreparedKernel:
    rows = min(tile.rows, power_of_two(bands))
    return PreparedKernel(
        _sum_bands_kernel,
        (cdiv(cols, tile.cols), matrices),
        *(bands, cols, is_early, rows, tile.cols),
        **tile.options,
        launch_pdl=is_early,
    )
