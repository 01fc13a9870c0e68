"""Casts to FP8 with one scale for each block, in both layouts of the GEMM, in one pass.

    amax      = max(max |x| over a block, epsilon)
    scale     = 448 / amax, floored to a power of two if asked; 1 if amax is 0, infinity or NaN
    q         = clamp(float(x) * scale, -448, 448) to E4M3, round to nearest even; NaN stays NaN
    scale_inv = 1 / scale, what the GEMM multiplies with

    block 1x128     128 elements along the dimension that is summed over: of a row in the rowwise output
                    [rows, cols], of a column in the columnwise one [cols, rows].  Each has its own scales, so
                    the two outputs differ in more than their layout.  For activations and gradients.
    block 128x128   one scale for both outputs, which hold the same bytes.  For weights.

The last block of a row or column may be smaller.  Scales are laid out as cuBLASLt reads them on Hopper:

    1x128      rowwise [rows, ceil(cols / 128)] with strides (1, rows), columnwise the same of x transposed
    128x128    rowwise [ceil(rows / 128), ceil(cols / 128) padded with zeros to a multiple of 4], contiguous,
               columnwise the same of x transposed

As Transformer Engine's Float8BlockScaling, after DeepSeek-V3 (2024).

Bytes per element, x of p bytes: p + 1 for each layout; scales add 4 / 128 each, or nothing to speak of.

`_vectors_kernel` casts by blocks of 1x128, `_squares_kernel` by blocks of 128x128.  Arguments of both:

    x_ptr                input [rows, cols], FP32, fp16 or bf16
        rowwise_ptr          q [rows, cols], E4M3; None with its scales if this layout is not requested
        columnwise_ptr       q transposed [cols, rows], E4M3; likewise
        epsilon_bits         the bits of epsilon, the smallest amax, as int32
    POWER_OF_TWO         floor scales to powers of two
    LARGEST, FLT_MAX     largest numbers of E4M3 and of FP32
    WHOLE                rows are a multiple of WHOLE_ROWS, so that the transpose is written in wide stores
    BLOCK                128, the columns of a tile, and the rows of one with 128x128 blocks
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import check_input, magnitude_bits
from flatfsdp.kernels.shared.pairs import (
    WHOLE_ROWS,
    larger_magnitude,
    load_row_pairs,
    store_row_pairs,
    store_transposed,
)
from flatfsdp.kernels.shared.triton import cdiv, jit, on_device_of, tl

BLOCK = 128
SCALE_PADDING = 4
"""Number of scales to which cuBLASLt pads a row of scales of 128x128 blocks."""

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
FLT_MAX = torch.finfo(torch.float32).max

# A tile of 128 x 128 is read once and stays in registers.  If blocks are rows only, tiles can be lower.
NUM_WARPS = 8
LOW_ROWS, LOW_WARPS = 32, 4

Block = Literal["1x128", "128x128"]


class BlockCast(NamedTuple):
    """Results of `block_cast`; None where not requested."""

    rowwise: Tensor | None
    """E4M3 [rows, cols]."""
    rowwise_scale_inv: Tensor | None
    """FP32; the module's docstring describes its layout and that of `columnwise_scale_inv`."""
    columnwise: Tensor | None
    """E4M3 [cols, rows]."""
    columnwise_scale_inv: Tensor | None


def _scale_of(amax: Tensor, power_of_two: bool, epsilon: float) -> Tensor:
    amax = amax.clamp(min=epsilon)  # which keeps NaN
    # Not `LARGEST / amax`, which PyTorch computes as a reciprocal and a multiplication: two roundings.
    scale = (torch.full_like(amax, LARGEST) / amax).clamp(max=FLT_MAX)
    if power_of_two:
        # Without the mantissa: the largest power of two below.
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def _quantized(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale).clamp(-LARGEST, LARGEST).to(DTYPE)


def _largest_in_blocks(values: Tensor, height: int) -> Tensor:
    """Largest magnitude of each block of `height` rows and 128 columns; NaN wins."""
    rows, cols = values.shape
    padding = (0, -cols % BLOCK, 0, -rows % height)
    padded = torch.nn.functional.pad(values.abs(), padding)
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height)).amax((1, 3))


def expand_blocks(of_blocks: Tensor, height: int, like: Tensor) -> Tensor:
    """Expand one number per block of `height` rows and 128 columns to one per element of `like`."""
    expanded = of_blocks.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
    return expanded[: like.shape[0], : like.shape[1]]


def vectors_reference(
    x: Tensor,
    rowwise: Tensor | None,
    rowwise_inv: Tensor | None,
    columnwise: Tensor | None,
    columnwise_inv: Tensor | None,
    power_of_two: bool,
    epsilon: float,
) -> None:
    for values, out, inv in ((x.float(), rowwise, rowwise_inv), (x.float().t(), columnwise, columnwise_inv)):
        if out is not None and inv is not None:
            scale = _scale_of(_largest_in_blocks(values, 1), power_of_two, epsilon)
            out.copy_(_quantized(values, expand_blocks(scale, 1, values)))
            inv.copy_((1 / scale).t())


def squares_reference(
    x: Tensor,
    rowwise: Tensor | None,
    rowwise_inv: Tensor | None,
    columnwise: Tensor | None,
    columnwise_inv: Tensor | None,
    power_of_two: bool,
    epsilon: float,
) -> None:
    values = x.float()
    scale = _scale_of(_largest_in_blocks(values, BLOCK), power_of_two, epsilon)
    q = _quantized(values, expand_blocks(scale, BLOCK, values))
    for out, inv, is_transposed in ((rowwise, rowwise_inv, False), (columnwise, columnwise_inv, True)):
        if out is not None and inv is not None:
            out.copy_(q.t() if is_transposed else q)
            blocks = scale.t() if is_transposed else scale
            inv[:, : blocks.shape[1]] = 1 / blocks


def vector_warps(dtype: torch.dtype) -> int:
    """Number of warps for 1x128 blocks in both layouts: few, as each computes scales of all its columns."""
    return 4 if dtype.itemsize == 2 else 8


def _bits(value: float) -> int:
    """The bits of an FP32 number, as int32."""
    return struct.unpack("i", struct.pack("f", value))[0]


@jit
def _scales(
    largest,  # largest magnitude of each block, FP32
    epsilon_bits,
    LARGEST: tl.constexpr,
    FLT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Scales and their inverses, FP32."""
    bits = tl.maximum(largest.to(tl.int32, bitcast=True), epsilon_bits)
    is_usable = (bits > 0) & (bits < 0x7F800000)
    if POWER_OF_TWO:
        # Without divisions: 448 / amax is 2^(8 - e), or half of it if amax is above 1.75 * 2^e.  Adding
        # 0x1FFFFF carries into the exponent if it is.  Exponents below 8 would give more than 2^127.
        exponent = tl.maximum((bits + 0x1FFFFF) & 0x7F800000, 8 << 23) - (8 << 23)
        scale_bits = tl.where(is_usable, 0x7F000000 - exponent, 0x3F800000)
        scale = scale_bits.to(tl.float32, bitcast=True)
        inverse_bits = tl.maximum(0x7F000000 - scale_bits, 0x00400000)  # at least 2^-127
        scale_inv = inverse_bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.minimum(tl.div_rn(LARGEST, bits.to(tl.float32, bitcast=True)), FLT_MAX)
        scale = tl.where(is_usable, scale, 1.0)
        scale_inv = tl.div_rn(1.0, scale)
    return scale, scale_inv


@jit
def _tile(rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Locate this program's tile of [BLOCK_ROWS, BLOCK].

    Returns its row and column among tiles, int64, and the numbers of rows and columns from its corner to the
    end of the matrix, int32.
    """
    across = tl.cdiv(cols, BLOCK)
    band, block = (tl.program_id(0) // across).to(tl.int64), (tl.program_id(0) % across).to(tl.int64)
    return band, block, (rows - band * BLOCK_ROWS).to(tl.int32), (cols - block * BLOCK).to(tl.int32)


@jit
def _vectors_kernel(
    x_ptr,
    rowwise_ptr,
    rowwise_inv_ptr,  # inverse scales [ceil(cols / 128), rows], FP32
    columnwise_ptr,
    columnwise_inv_ptr,  # inverse scales [ceil(rows / 128), cols], FP32
    rows,
    cols,
    epsilon_bits,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    FLT_MAX: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,  # half the rows of a tile: with a columnwise output, half of 128
    BLOCK: tl.constexpr,
):
    """Cast one tile by blocks of 1x128."""
    band, block, rows_left, cols_left = _tile(rows, cols, 2 * PAIRS, BLOCK)
    row, col = band * 2 * PAIRS, block * BLOCK
    corner = row * cols + col
    upper, lower = load_row_pairs(x_ptr + corner, cols, rows_left, cols_left, PAIRS, BLOCK)
    # Both maxima before any result: neither then waits for stores of the other layout.
    if rowwise_ptr is not None:
        of_rows = tl.join(tl.reduce(upper, 1, larger_magnitude), tl.reduce(lower, 1, larger_magnitude))
    if columnwise_ptr is not None:
        of_cols = tl.reduce(larger_magnitude(upper, lower), 0, larger_magnitude)
    if rowwise_ptr is not None:
        scale, scale_inv = _scales(of_rows, epsilon_bits, LARGEST, FLT_MAX, POWER_OF_TWO)
        scale_upper, scale_lower = tl.split(scale)
        store_row_pairs(
            *(upper * scale_upper[:, None], lower * scale_lower[:, None]),
            *(rowwise_ptr + corner, cols, rows_left, cols_left),
        )
        at = tl.arange(0, 2 * PAIRS)
        inverses = tl.reshape(scale_inv, [2 * PAIRS])
        tl.store(rowwise_inv_ptr + block * rows + row + at, inverses, at < rows_left)
    if columnwise_ptr is not None:
        scale, scale_inv = _scales(of_cols, epsilon_bits, LARGEST, FLT_MAX, POWER_OF_TWO)
        store_transposed(
            *(upper * scale[None, :], lower * scale[None, :]),
            *(columnwise_ptr + col * rows + row, rows, rows_left, cols_left, WHOLE),
        )
        at = tl.arange(0, BLOCK)
        tl.store(columnwise_inv_ptr + band * cols + col + at, scale_inv, at < cols_left)


def vectors_launch(
    x: Tensor,
    rowwise: Tensor | None,
    rowwise_inv: Tensor | None,
    columnwise: Tensor | None,
    columnwise_inv: Tensor | None,
    power_of_two: bool,
    epsilon: float,
) -> None:
    rows, cols = x.shape
    block_rows = LOW_ROWS if columnwise is None else BLOCK
    with on_device_of(x):
        _vectors_kernel[(cdiv(rows, block_rows) * cdiv(cols, BLOCK),)](
            *(x, rowwise, rowwise_inv, columnwise, columnwise_inv),
            *(rows, cols, _bits(epsilon), power_of_two, LARGEST, FLT_MAX),
            *(rows % WHOLE_ROWS == 0, block_rows // 2, BLOCK),
            num_warps=LOW_WARPS if columnwise is None else vector_warps(x.dtype),
        )


@jit
def _squares_kernel(
    x_ptr,
    rowwise_ptr,
    rowwise_inv_ptr,  # inverse scales [ceil(rows / 128), rowwise_inv_stride], FP32
    columnwise_ptr,
    columnwise_inv_ptr,  # inverse scales [ceil(cols / 128), columnwise_inv_stride], FP32
    rows,
    cols,
    rowwise_inv_stride,  # ceil(cols / 128), padded to a multiple of SCALE_PADDING
    columnwise_inv_stride,  # ceil(rows / 128), padded alike
    epsilon_bits,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    FLT_MAX: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one tile, which is a block of 128x128."""
    band, block, rows_left, cols_left = _tile(rows, cols, BLOCK, BLOCK)
    row, col = band * BLOCK, block * BLOCK
    corner = row * cols + col
    upper, lower = load_row_pairs(x_ptr + corner, cols, rows_left, cols_left, BLOCK // 2, BLOCK)
    largest = tl.max(magnitude_bits(larger_magnitude(upper, lower))).to(tl.float32, bitcast=True)
    scale, scale_inv = _scales(largest, epsilon_bits, LARGEST, FLT_MAX, POWER_OF_TWO)
    upper, lower = upper * scale, lower * scale
    if rowwise_ptr is not None:
        store_row_pairs(upper, lower, rowwise_ptr + corner, cols, rows_left, cols_left)
        tl.store(rowwise_inv_ptr + band * rowwise_inv_stride + block, scale_inv)
    if columnwise_ptr is not None:
        at = columnwise_ptr + col * rows + row
        store_transposed(upper, lower, at, rows, rows_left, cols_left, WHOLE)
        tl.store(columnwise_inv_ptr + block * columnwise_inv_stride + band, scale_inv)


def squares_launch(
    x: Tensor,
    rowwise: Tensor | None,
    rowwise_inv: Tensor | None,
    columnwise: Tensor | None,
    columnwise_inv: Tensor | None,
    power_of_two: bool,
    epsilon: float,
) -> None:
    rows, cols = x.shape
    strides = (padded_blocks(cols), padded_blocks(rows))
    with on_device_of(x):
        _squares_kernel[(cdiv(rows, BLOCK) * cdiv(cols, BLOCK),)](
            *(x, rowwise, rowwise_inv, columnwise, columnwise_inv),
            *(rows, cols, *strides, _bits(epsilon), power_of_two, LARGEST, FLT_MAX),
            *(rows % WHOLE_ROWS == 0, BLOCK),
            num_warps=NUM_WARPS,
        )


_ARGUMENTS = (
    "(Tensor x, Tensor(a!)? rowwise, Tensor(b!)? rowwise_inv, Tensor(c!)? columnwise, "
    "Tensor(d!)? columnwise_inv, bool power_of_two, float epsilon) -> ()"
)
_cast_vectors = operator(
    f"block_cast_vectors_{_ARGUMENTS}", reference=vectors_reference, launch=vectors_launch
)
_cast_squares = operator(
    f"block_cast_squares_{_ARGUMENTS}", reference=squares_reference, launch=squares_launch
)


def block_cast(
    x: Tensor,
    *,
    block: Block,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool = True,
    epsilon: float = 0.0,
) -> BlockCast:
    """Cast `x` to E4M3 with a scale for each block.

    Args:
        x: bf16, fp16 or FP32 [rows, cols], contiguous; there may be no rows.
        block: "1x128" or "128x128".
        rowwise: whether to return q [rows, cols] and its scales.
        columnwise: whether to return q transposed [cols, rows] and its scales.
        power_of_two: round scales down to powers of two, so that scaling is exact.
        epsilon: smallest amax that a block's scale is computed from.

    Returns:
        The matrices, and `scale_inv` of each, FP32, in the layout of the module's docstring.

    Raises:
        ValueError: if x does not fit, the block is unknown, or neither layout is requested.
    """
    check_input("x", x)
    if block not in ("1x128", "128x128"):
        raise ValueError(f"block is {block!r}; block_cast knows '1x128' and '128x128'")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False; ask block_cast for at least one layout")
    rows, cols = x.shape
    is_square = block == "128x128"
    allocate = _square_scales if is_square else _vector_scales
    rowwise_inv = allocate(x, rows, cols) if rowwise else None
    columnwise_inv = allocate(x, cols, rows) if columnwise else None
    result = BlockCast(
        x.new_empty(rows, cols, dtype=DTYPE) if rowwise else None,
        rowwise_inv if rowwise_inv is None or is_square else rowwise_inv.t(),
        x.new_empty(cols, rows, dtype=DTYPE) if columnwise else None,
        columnwise_inv if columnwise_inv is None or is_square else columnwise_inv.t(),
    )
    if x.numel():
        run = _cast_squares if is_square else _cast_vectors
        run(x, result.rowwise, rowwise_inv, result.columnwise, columnwise_inv, power_of_two, epsilon)
    return result


def _vector_scales(x: Tensor, rows: int, cols: int) -> Tensor:
    """Allocate scales of 1x128 blocks, contiguous: the transpose of what `block_cast` returns."""
    return x.new_empty(cdiv(cols, BLOCK), rows, dtype=torch.float32)


def _square_scales(x: Tensor, rows: int, cols: int) -> Tensor:
    """Allocate scales of 128x128 blocks, with zeros in the padding."""
    return x.new_zeros(cdiv(rows, BLOCK), padded_blocks(cols), dtype=torch.float32)


def padded_blocks(size: int) -> int:
    """Number of 128s that hold `size`, padded as cuBLASLt reads scales."""
    return cdiv(cdiv(size, BLOCK), SCALE_PADDING) * SCALE_PADDING
