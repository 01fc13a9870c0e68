"""To FP8 in one pass: both layouts of the GEMM, the amax, and the column sums that a bias gradient is.

    q          = clamp(float(x) * scale, -max, max) to FP8, round to nearest even; NaN stays NaN
    rowwise    = q                  [rows, cols]
    columnwise = q transposed       [cols, rows]; Hopper's FP8 GEMMs read operands along K only
    amax       = max(amax, max |x|) before scaling; NaN wins
    column_sum = sum over rows of float(x)

Bytes per element, x of p bytes: p + 1 for each layout; column sums add 8 for each band of rows, the height of
a tile.  The amax is a maximum of integers (the bits of |x|), which no order of programs changes.

As Transformer Engine's cast + transpose + dbias.

`max_abs` is the amax alone, for scales that are computed from the tensor itself: p bytes per element.

`transpose` and `transpose_many` turn around what is FP8 already, such as weights after an all-gather: 2 bytes
per element.  A scale belongs to the whole tensor, so moving bytes is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import (
    FP8_DTYPES,
    check_input,
    check_scalar,
    new_bands,
    record_amax,
    starts_early,
    sum_bands,
    write_outputs,
)
from flatfsdp.kernels._pairs import (
    WHOLE_ROWS,
    larger_magnitude,
    read_row_pairs,
    store_column_sums,
    store_pairs,
    widened,
)
from flatfsdp.kernels._tiles import Tile, find, power_of_two
from flatfsdp.kernels._triton import Launch, cdiv, for_each_shape, jit, tl
from flatfsdp.kernels.flat import (
    LOAD_BYTES,
    are_aligned,
    first_blocks,
    is_aligned,
    kept_table,
    tensor_of_block,
)
from torch import Tensor


class Cast(NamedTuple):
    """What `cast` was asked for; the rest is None."""

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
    x_ptr,
    scale_ptr,
    rowwise_ptr,
    columnwise_ptr,
    amax_ptr,
    band_sums_ptr,
    rows,
    cols,
    IS_EARLY: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
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
    upper = widened(upper)
    lower = widened(lower)
    if amax_ptr is not None:
        record_amax(amax_ptr, larger_magnitude(upper, lower))
    store_pairs(
        *(upper, lower, row, col, rows, cols, rows_left, cols_left),
        *(None, rowwise_ptr, columnwise_ptr, tl.load(scale_ptr), WHOLE),
    )


@for_each_shape
def _cast_launch(rows: int, cols: int, tile: Tile, is_early: bool) -> Launch:
    return Launch(
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
    start = _cast_launch(rows, cols, tile, starts_early(x.device))
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
    """Casts `x` to FP8, in the layouts that the coming GEMMs read.

    Args:
        x: bf16, fp16 or FP32 [rows, cols], contiguous.
        scale: FP32, one element, on x's device; what it multiplies with has to be divided by in the GEMM.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        amax: FP32, one element, never negative; raised in place to max |x| if that is larger.
        rowwise: return q [rows, cols].
        columnwise: return q transposed [cols, rows].
        column_sum: return the sums over rows, [cols] in this dtype, of x before scaling; None: do not.

    Raises:
        ValueError: if a shape or dtype does not fit, or neither layout is asked for.
    """
    check_input("x", x)
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}; cast makes torch.float8_e4m3fn or torch.float8_e5m2")
    if not (rowwise or columnwise):
        raise ValueError("rowwise and columnwise are both False; ask cast for at least one layout")
    check_scalar("scale", scale, x)
    check_scalar("amax", amax, x)
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
def _max_abs_kernel(x_ptr, amax_ptr, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    record_amax(amax_ptr, tl.load(x_ptr + index, index < numel, 0.0).to(tl.float32))


@for_each_shape
def _max_abs_launch(numel: int, tile: Tile) -> Launch:
    return Launch(_max_abs_kernel, (cdiv(numel, tile.cols),), numel, tile.cols, **tile.options)


def max_abs_launch(x: Tensor, amax: Tensor) -> None:
    _max_abs_launch(x.numel(), find("max_abs", x.dtype, x.shape[1]))(x, amax)


_max_abs = operator(
    "max_abs_(Tensor x, Tensor(a!) amax) -> ()", reference=max_abs_reference, launch=max_abs_launch
)


def max_abs(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude in `x`, FP32 [1]; 0 if it is empty, NaN if it holds one.

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


def transpose_reference(q: Tensor, out: Tensor) -> None:
    out.view(torch.uint8).copy_(q.view(torch.uint8).t())


@jit
def transpose_tile(
    q_ptr,
    out_ptr,
    rows,
    cols,
    top,
    left,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Bytes of the tile at (top, left), both int64 and even; `WHOLE` as by `is_whole`."""
    if WHOLE:
        _transpose_pairs(q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS, BLOCK_COLS)
    else:
        _transpose_bytes(q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS, BLOCK_COLS)


@jit
def _transpose_pairs(
    q_ptr, out_ptr, rows, cols, top, left, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Bytes of two rows become 16-bit pairs, which the hardware transposes (ldmatrix)."""
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
    block,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    across = tl.cdiv(cols, BLOCK_COLS)
    top = (block // across).to(tl.int64) * BLOCK_ROWS
    left = (block % across).to(tl.int64) * BLOCK_COLS
    transpose_tile(q_ptr, out_ptr, rows, cols, top, left, WHOLE, BLOCK_ROWS, BLOCK_COLS)


@jit
def _transpose_kernel(
    q_ptr, out_ptr, rows, cols, WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    # From the end: what was written last, before this, is still in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    _transpose_block(q_ptr, out_ptr, rows, cols, block, WHOLE, BLOCK_ROWS, BLOCK_COLS)


@for_each_shape
def _transpose_launch(rows: int, cols: int, tile: Tile, whole: bool) -> Launch:
    programs = cdiv(rows, tile.rows) * cdiv(cols, tile.cols)
    return Launch(_transpose_kernel, (programs,), rows, cols, whole, tile.rows, tile.cols, **tile.options)


def transpose_launch(q: Tensor, out: Tensor) -> None:
    start = _transpose_launch(*q.shape, find("transpose", q.dtype, q.shape[1]), is_whole(q, out))
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
    table_ptr,
    n,
    N_POW2: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    block = tl.program_id(0)
    row_ptr = table_ptr + tensor_of_block(table_ptr, n, block, N_POW2)
    q_ptr = tl.load(row_ptr + n).to(tl.pointer_type(tl.uint8))
    out_ptr = tl.load(row_ptr + 2 * n).to(tl.pointer_type(tl.uint8))
    rows = tl.load(row_ptr + 3 * n)
    cols = tl.load(row_ptr + 4 * n)
    if WHOLE:
        # What Triton finds out by itself about arguments, but not about what is loaded.
        q_ptr = tl.multiple_of(q_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
        rows = tl.multiple_of(rows, 16)
        cols = tl.multiple_of(cols, 16)
    _transpose_block(q_ptr, out_ptr, rows, cols, block - tl.load(row_ptr), WHOLE, BLOCK_ROWS, BLOCK_COLS)


def transpose_many_launch(like: Tensor, sources: list[Tensor], targets: list[Tensor]) -> None:
    shapes = [source.shape for source in sources]
    # One for all of them, whatever their widths.
    tile = find("transpose", like.dtype, max(cols for _, cols in shapes))
    starts, blocks = first_blocks([cdiv(rows, tile.rows) * cdiv(cols, tile.cols) for rows, cols in shapes])
    fields = [
        starts,
        [source.data_ptr() for source in sources],
        [target.data_ptr() for target in targets],
        [rows for rows, _ in shapes],
        [cols for _, cols in shapes],
    ]
    start = _transpose_many_launch(blocks, len(sources), are_aligned(*fields[1:]), tile)
    start(kept_table(fields, like.device))


@for_each_shape
def _transpose_many_launch(blocks: int, n: int, whole: bool, tile: Tile) -> Launch:
    numbers = (n, power_of_two(n), whole, tile.rows, tile.cols)
    return Launch(_transpose_many_kernel, (blocks,), *numbers, **tile.options)


# `like` is there for the dispatch, which looks at the first argument.
_transpose_many = operator(
    "transpose_many_(Tensor like, Tensor[] sources, Tensor(a!)[] targets) -> ()",
    reference=transpose_many_reference,
    launch=transpose_many_launch,
)


def transpose_many(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Transposes many FP8 matrices in one launch, such as all weights of a unit after their all-gather.

    Addresses and shapes go to the device in a table (see `flat.kept_table`) rather than as arguments: one
    compiled kernel then serves every list, and nothing waits for the device.

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
    """Every row of both starts at a multiple of the widest load, as in all that an FP8 GEMM takes."""
    return is_aligned(q, out) and all(size % LOAD_BYTES == 0 for size in q.shape)


def _check_matrix(name: str, q: Tensor) -> None:
    if q.dim() != 2 or q.dtype not in FP8_DTYPES or not q.is_contiguous():
        raise ValueError(
            f"{name} is {q.dtype} {tuple(q.shape)} with strides {q.stride()}; it has to be a contiguous FP8 "
            "matrix"
        )
