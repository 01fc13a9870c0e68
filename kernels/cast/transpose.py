"""Transposes of FP8 matrices, such as weights after an all-gather: one, or all of a unit in one launch.

    out = q transposed    [cols, rows]

Bytes per element: 2.  A scale belongs to the whole tensor, so moving bytes is exact.

Arguments shared by the kernels of this file:

    q_ptr                     matrix [rows, cols], FP8 as bytes
    out_ptr                   its transpose [cols, rows], FP8 as bytes
        WHOLE                     rows of both start at multiples of 16 bytes (`is_whole`): move pairs of
        bytes
    BLOCK_ROWS, BLOCK_COLS    size of a tile, which one program transposes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import FP8_DTYPES
from flatfsdp.kernels.shared.tables import (
    LOAD_BYTES,
    are_aligned,
    first_blocks,
    is_aligned,
    kept_table,
    tensor_of_block,
)
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


def transpose_reference(q: Tensor, out: Tensor) -> None:
    out.view(torch.uint8).copy_(q.view(torch.uint8).t())


@jit
def transpose_tile(
    q_ptr,
    out_ptr,
    rows,
    cols,
    top,  # index of the tile's first row, int64 and even
    left,  # index of its first column, int64 and even
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Transpose the tile at (top, left)."""
    if WHOLE:
        _transpose_pairs(q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS, BLOCK_COLS)
    else:
        _transpose_bytes(q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS, BLOCK_COLS)


@jit
def _transpose_pairs(
    q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Transpose a tile in pairs of two rows' bytes: 16 bits, which the hardware transposes (ldmatrix)."""
    pairs = tl.multiple_of(rows // 2, 8)
    pair = (top // 2 + tl.arange(0, BLOCK_ROWS // 2))[:, None]
    col = (left + tl.arange(0, BLOCK_COLS))[None, :]
    mask = (pair < pairs) & (col < cols)
    upper = tl.load(q_ptr + 2 * pair * cols + col, mask, 0).to(tl.uint16)
    lower = tl.load(q_ptr + (2 * pair + 1) * cols + col, mask, 0).to(tl.uint16)
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint16))
    tl.store(out_ptr + tl.trans(col * pairs + pair), tl.trans(upper | (lower << 8)), tl.trans(mask))


@jit
def _transpose_bytes(
    q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Transpose a tile byte by byte."""
    row = (top + tl.arange(0, BLOCK_ROWS))[:, None]
    col = (left + tl.arange(0, BLOCK_COLS))[None, :]
    mask = (row < rows) & (col < cols)
    q = tl.load(q_ptr + row * cols + col, mask, 0)
    tl.store(out_ptr + tl.trans(col * rows + row), tl.trans(q), tl.trans(mask))


@jit
def _transpose_block(
    q_ptr,
    out_ptr,
    rows,
    cols,
    block,  # number of the tile, row by row
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Transpose one of the tiles of a matrix."""
    across = tl.cdiv(cols, BLOCK_COLS)
    top = (block // across).to(tl.int64) * BLOCK_ROWS
    left = (block % across).to(tl.int64) * BLOCK_COLS
    transpose_tile(q_ptr, out_ptr, rows, cols, top, left, WHOLE, BLOCK_ROWS, BLOCK_COLS)


@jit
def _transpose_kernel(
    q_ptr, out_ptr, rows, cols, WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Transpose one matrix."""
    # From the end: what was written last is still in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    _transpose_block(q_ptr, out_ptr, rows, cols, block, WHOLE, BLOCK_ROWS, BLOCK_COLS)


@for_each_shape
def _prepared_transpose(rows: int, cols: int, tile: Tile, whole: bool) -> PreparedKernel:
    programs = cdiv(rows, tile.rows) * cdiv(cols, tile.cols)
    return PreparedKernel(
        _transpose_kernel, (programs,), rows, cols, whole, tile.rows, tile.cols, **tile.options
    )


def transpose_launch(q: Tensor, out: Tensor) -> None:
    start = _prepared_transpose(*q.shape, find("transpose", q.dtype, q.shape[1]), is_whole(q, out))
    start(q.view(torch.uint8), out.view(torch.uint8))


_transpose = operator(
    "transpose_(Tensor q, Tensor(a!) out) -> ()", reference=transpose_reference, launch=transpose_launch
)


def transpose(q: Tensor) -> Tensor:
    """The transpose [cols, rows], contiguous, of an FP8 matrix [rows, cols].

    Raises:
        ValueError: if `q` is not a contiguous FP8 matrix.
    """
    _check_matrix("q", q)
    out = q.new_empty(q.shape[1], q.shape[0])
    _transpose(q, out)
    return out


def transpose_many_reference(like: Tensor, sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        transpose_reference(source, target)


@jit
def _transpose_many_kernel(
    table_ptr,  # [5, n], int64: number of each matrix's first tile, addresses of q and out, rows, cols
    n,  # number of matrices
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Transpose many matrices."""
    block = tl.program_id(0)
    row_ptr = table_ptr + tensor_of_block(table_ptr, n, block, N_POW2)
    q_ptr = tl.load(row_ptr + n).to(tl.pointer_type(tl.uint8))
    out_ptr = tl.load(row_ptr + 2 * n).to(tl.pointer_type(tl.uint8))
    rows = tl.load(row_ptr + 3 * n)
    cols = tl.load(row_ptr + 4 * n)
    if WHOLE:
        # Triton derives this for arguments, but not for loaded values.
        q_ptr = tl.multiple_of(q_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
        rows = tl.multiple_of(rows, 16)
        cols = tl.multiple_of(cols, 16)
    _transpose_block(q_ptr, out_ptr, rows, cols, block - tl.load(row_ptr), WHOLE, BLOCK_ROWS, BLOCK_COLS)


def transpose_many_launch(like: Tensor, sources: list[Tensor], targets: list[Tensor]) -> None:
    shapes = [source.shape for source in sources]
    # One tile for all of them, whatever their widths.
    tile = find("transpose", like.dtype, max(cols for _, cols in shapes))
    starts, blocks = first_blocks([cdiv(rows, tile.rows) * cdiv(cols, tile.cols) for rows, cols in shapes])
    fields = [
        starts,
        [source.data_ptr() for source in sources],
        [target.data_ptr() for target in targets],
        [rows for rows, _ in shapes],
        [cols for _, cols in shapes],
    ]
    start = _prepared_transpose_many(blocks, len(sources), are_aligned(*fields[1:]), tile)
    start(kept_table(fields, like.device))


@for_each_shape
def _prepared_transpose_many(blocks: int, n: int, whole: bool, tile: Tile) -> PreparedKernel:
    numbers = (n, power_of_two(n), whole, tile.rows, tile.cols)
    return PreparedKernel(_transpose_many_kernel, (blocks,), *numbers, **tile.options)


# `like` exists for the dispatch, which reads the first argument.
_transpose_many = operator(
    "transpose_many_(Tensor like, Tensor[] sources, Tensor(a!)[] targets) -> ()",
    reference=transpose_many_reference,
    launch=transpose_many_launch,
)


def transpose_many(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Transpose many FP8 matrices in one launch, such as all weights of a unit after their all-gather.

    Addresses and shapes are passed in a table on the device (`kept_table`) instead of as arguments, so one
    compiled kernel serves every list, and nothing waits for the device.

    Args:
        pairs: source [rows, cols] and target [cols, rows], contiguous, of one dtype; all on one device.

    Raises:
        ValueError: if a tensor is not a contiguous FP8 matrix, or source and target do not fit.
    """
    if not pairs:
        return
    device = pairs[0][0].device
    for index, (source, target) in enumerate(pairs):
        _check_matrix(f"pairs[{index}][0]", source)
        _check_matrix(f"pairs[{index}][1]", target)
        fits = target.shape == source.shape[::-1] and target.dtype == source.dtype
        if not fits or not source.device == target.device == device:
            raise ValueError(
                f"pairs[{index}] is {source.dtype} {tuple(source.shape)} on {source.device} and "
                f"{target.dtype} {tuple(target.shape)} on {target.device}; transpose_many needs the "
                f"transposed shape, one dtype, and one device for all pairs, here {device}"
            )
    sources, targets = zip(*pairs, strict=True)
    _transpose_many(sources[0], list(sources), list(targets))


def is_whole(q: Tensor, out: Tensor) -> bool:
    """Whether every row of both starts at a multiple of the widest load, as for all operands of FP8 GEMMs."""
    return is_aligned(q, out) and all(size % LOAD_BYTES == 0 for size in q.shape)


def _check_matrix(name: str, q: Tensor) -> None:
    if q.dim() != 2 or q.dtype not in FP8_DTYPES or not q.is_contiguous():
        raise ValueError(
            f"{name} is {q.dtype} {tuple(q.shape)} with strides {q.stride()}; it has to be a contiguous FP8 "
            "matrix"
        )
