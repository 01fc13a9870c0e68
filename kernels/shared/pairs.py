"""Tiles held as pairs of rows, for kernels that also write the transpose of what they cast to FP8.

Two tensors [pairs, cols] form a tile: `upper` has its even rows, `lower` its odd ones.  A conversion to FP8
makes two bytes from two numbers anyway.  Taken from adjacent rows, they are also adjacent in the transpose,
and the hardware transposes in units of 16 bits (ldmatrix); single bytes take three times as many
instructions.

The rowwise store has its own conversion: ptxas (12.8, 12.9; Triton issue 11111) loses bytes of FP8 pairs that
are both stored and transposed.  Conversions on the GPU saturate, and keep NaN.

Arguments shared by the functions of this file:

    ptr                    the tile's first element in the matrix, unless said otherwise
    rows, cols             size of the whole matrix, not of the tile
    rows_left, cols_left   rows and columns of the matrix from the tile's corner on, int32
    upper, lower           the tile's even and odd rows, [pairs, cols] each, FP32 unless said otherwise
    PAIRS, COLS            half the rows of a tile, and its columns
    WHOLE                  whether WHOLE_ROWS divides `rows`, so that the transpose is written in wide stores
"""

from __future__ import annotations

from flatfsdp.kernels.shared.triton import jit, tl

WHOLE_ROWS = 16
"""If rows are a multiple of it, 16 bytes can be stored at once wherever a tile's columns begin."""


@jit
def larger_magnitude(left, right):
    """The larger of |left| and |right|; NaN wins."""
    return tl.maximum(tl.abs(left), tl.abs(right), propagate_nan=tl.PropagateNan.ALL)


@jit
def to_fp32(x):
    """Cast to FP32; bf16 by its bits, because Triton's cast takes three instructions for two numbers."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def read_row_pairs(ptr, cols, rows_left, cols_left, PAIRS: tl.constexpr, COLS: tl.constexpr):
    """Load the upper and lower rows of a tile, in the matrix's dtype; zeros outside the matrix."""
    row = 2 * tl.arange(0, PAIRS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    at = ptr + row * cols + col
    upper = tl.load(at, (row < rows_left) & (col < cols_left), 0.0)
    lower = tl.load(at + cols, (row + 1 < rows_left) & (col < cols_left), 0.0)
    return upper, lower


@jit
def load_row_pairs(ptr, cols, rows_left, cols_left, PAIRS: tl.constexpr, COLS: tl.constexpr):
    """Load the upper and lower rows of a tile, in FP32; zeros outside the matrix."""
    upper, lower = read_row_pairs(ptr, cols, rows_left, cols_left, PAIRS, COLS)
    return to_fp32(upper), to_fp32(lower)


@jit
def store_column_sums(upper, lower, ptr, cols_left):
    """Store sums over the rows of a tile, FP32, at `ptr`; upper and lower have the dtype that was read.

    16-bit numbers are added by a matrix multiplication with ones, which is exact but for its FP32 additions:
    so the sums of a column need no exchange between threads.
    """
    if upper.dtype == tl.float32:
        sums = tl.sum(upper + lower, axis=0)
    else:
        ones = tl.full([16, upper.shape[0]], 1.0, tl.float32).to(upper.dtype)
        sums = tl.max(tl.dot(ones, lower, tl.dot(ones, upper)), axis=0)  # of 16 rows, which are all alike
    col = tl.arange(0, upper.shape[1])
    tl.store(ptr + col, sums, col < cols_left)


@jit
def store_row_pairs(upper, lower, ptr, cols, rows_left, cols_left):
    """Store a tile in a matrix [rows, cols] of any dtype."""
    row = 2 * tl.arange(0, upper.shape[0])[:, None]
    col = tl.arange(0, upper.shape[1])[None, :]
    at = ptr + row * cols + col
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(at, upper.to(dtype), (row < rows_left) & (col < cols_left))
    tl.store(at + cols, lower.to(dtype), (row + 1 < rows_left) & (col < cols_left))


@jit
def store_transposed(upper, lower, ptr, rows, rows_left, cols_left, WHOLE: tl.constexpr):
    """Store a tile in the transpose [cols, rows], FP8; `ptr` points to the tile's corner there.

    If `WHOLE`, WHOLE_ROWS has to divide the tile's height, too.
    """
    pair = tl.arange(0, upper.shape[0])[None, :]
    col = tl.arange(0, upper.shape[1])[:, None]
    q = tl.join(upper, lower).to(ptr.dtype.element_ty)
    if WHOLE:
        first, second = tl.split(q.to(tl.uint8, bitcast=True))
        both = first.to(tl.uint16) | (second.to(tl.uint16) << 8)
        at = ptr.to(tl.pointer_type(tl.uint16)) + col * tl.multiple_of(rows // 2, 8) + pair
        tl.store(at, tl.trans(both), (col < cols_left) & (pair < tl.multiple_of(rows_left // 2, 8)))
    else:
        row = tl.join(2 * pair, 2 * pair + 1)
        at = ptr + col[:, :, None] * rows + row
        tl.store(at, tl.permute(q, (1, 0, 2)), (col < cols_left)[:, :, None] & (row < rows_left))


@jit
def store_pairs(
    upper,
    lower,
    row,  # index of the tile's first row, int64
    col,  # index of its first column
    rows,
    cols,
    rows_left,
    cols_left,
    out_ptr,  # result [rows, cols], any dtype; None: not written, like the next two
    rowwise_ptr,  # scaled result [rows, cols], FP8
    columnwise_ptr,  # its transpose [cols, rows], FP8
    scale,  # number that the FP8 forms are multiplied by
    WHOLE: tl.constexpr,
):
    """Store a tile in each form whose pointer is not None."""
    corner = row * cols + col
    if out_ptr is not None:
        store_row_pairs(upper, lower, out_ptr + corner, cols, rows_left, cols_left)
    upper *= scale
    lower *= scale
    if rowwise_ptr is not None:
        store_row_pairs(upper, lower, rowwise_ptr + corner, cols, rows_left, cols_left)
    if columnwise_ptr is not None:
        at = columnwise_ptr + col.to(tl.int64) * rows + row
        store_transposed(upper, lower, at, rows, rows_left, cols_left, WHOLE)
