"""A norm whose programs keep whole rows in registers.

For a columnwise output, other programs run between those.  Each transposes a tile of rowwise bytes, from the
L2 cache, once all rows of the tile's band have arrived: 5 bytes per element instead of 4 for bf16, of which
memory sees 4.  (To transpose its own rows, a program would have to hold 32 of them, because memory transfers
at least 32 bytes: `transposed.py` does this where it can.)  They come some bands later and so rarely wait.
They wait only for lower-numbered programs, and GPUs start programs in the order of their numbers (as CUB's
scans rely on), so none waits for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flatfsdp.kernels.cast.transpose import is_whole, transpose_tile
from flatfsdp.kernels.norm.tensors import NormTensors, load_fp32, load_gain, load_summed
from flatfsdp.kernels.shared.outputs import record_amax, starts_early
from flatfsdp.kernels.shared.pairs import larger_magnitude
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

CLEARED = 256
"""Number of arrival counters that one program clears."""
KEPT = "evict_last"
"""Eviction policy of the L2 cache for rowwise bytes that will be transposed."""


def row_tile(dtype: torch.dtype, cols: int, *, rms: bool, is_transposed: bool) -> Tile:
    """A tile of whole rows; of narrow ones more at a time, in fewer steps.

    Args:
        dtype: dtype of x.
        cols: columns of x.
        rms: RMSNorm instead of LayerNorm.
        is_transposed: whether other programs transpose.
    """
    kernel = "rms_norm" if rms else "layer_norm"
    return _of_whole_rows(find(f"{kernel}, transpose" if is_transposed else kernel, dtype, cols), cols)


@for_each_shape
def _of_whole_rows(tile: Tile, cols: int) -> Tile:
    width = max(16, power_of_two(cols))
    times = max(1, tile.cols // width)
    return tile._replace(rows=tile.rows * times, cols=width, steps=max(1, tile.steps // times))


class TransposeWork(NamedTuple):
    """Parameters of the programs that transpose rows normalized by others.

    Attributes:
        band: rows that are transposed together, which is the number of contiguous bytes stored of a column.
        bytes: bytes that each thread transposes.
        warps: warps in flight between rows and their transpose, so that it need not wait.  An H200 holds up
            to 8448 at a time, and fewer of a kernel with many registers.
    """

    band: int
    bytes: int
    warps: int


TRANSPOSE_WORK = TransposeWork(band=64, bytes=64, warps=6144)
SLIM_TRANSPOSE_WORK = TransposeWork(band=128, bytes=128, warps=4224)
"""Parameters for many programs of few warps each: as many bytes of a program, half as many programs."""
SLIM_WARPS = 4
"""Largest number of warps of a program for `SLIM_TRANSPOSE_WORK`."""
MANY_ELEMENTS = 2**25
"""Smallest number of elements that gives enough programs for `SLIM_TRANSPOSE_WORK`."""


def transpose_work(rows: int, cols: int, tile: Tile) -> TransposeWork:
    """The parameters of the programs that transpose [rows, cols]."""
    is_slim = tile.warps <= SLIM_WARPS and rows * cols >= MANY_ELEMENTS
    return SLIM_TRANSPOSE_WORK if is_slim else TRANSPOSE_WORK


class Schedule(NamedTuple):
    """Order of the programs, in which those that transpose a band follow those that normalize it.

    Attributes:
        programs: number of all programs, of both kinds.
        band: rows that are transposed together.
        cols: columns of the tile that one program transposes.
        delay: bands between a band's rows and its transpose.
    """

    programs: int
    band: int
    cols: int = 1
    delay: int = 0


def schedule(rows: int, cols: int, tile: Tile, *, is_transposed: bool) -> Schedule:
    """The order of all programs for [rows, cols]; without a transpose all of them normalize."""
    rows_each = tile.rows * tile.steps
    if not is_transposed:
        return Schedule(cdiv(rows, rows_each), rows_each)
    work = transpose_work(rows, cols, tile)
    band = max(work.band, rows_each)
    transpose_cols = max(1, work.bytes * 32 * tile.warps // band)
    programs = band // rows_each + cdiv(cols, transpose_cols)
    bands = cdiv(rows, band)
    delay = min(bands, cdiv(work.warps, programs * tile.warps))
    return Schedule((bands + delay) * programs, band, transpose_cols, delay)


@jit
def _peaks(value, VECTOR: tl.constexpr):
    """Largest magnitudes of a tile in groups of VECTOR neighbouring columns, [cols / VECTOR]."""
    of_columns = tl.reduce(value, 0, larger_magnitude)
    return tl.reduce(tl.reshape(of_columns, [value.shape[1] // VECTOR, VECTOR]), 1, larger_magnitude)


@jit
def _normalize(
    first,  # index of the program's first row
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    summed_ptr,
    mean_ptr,
    rstd_ptr,
    out_ptr,
    rowwise_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    eps,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    ROWWISE_POLICY: tl.constexpr,
):
    """Normalize the rows of one program; other arguments are those of `_row_kernel`."""
    col = tl.arange(0, BLOCK_COLS)
    # None if there is nothing to mask: masks cost an instruction per element, in several places.
    col_mask = None if COLS == BLOCK_COLS else col < COLS
    mask = None if COLS == BLOCK_COLS else (col < COLS)[None, :]
    vector: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    if STEPS > 1:
        gain = load_gain(weight_ptr, col, col_mask, ZERO_CENTERED)
        if bias_ptr is not None:
            bias = load_fp32(bias_ptr + col, col_mask, "evict_last")
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    largest = tl.zeros([BLOCK_COLS // vector], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        # Below the last row, the last row is repeated: the same values are stored to the same place.
        row = tl.minimum(first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), rows - 1)
        # Threads take 16 bytes of x each, which suits loads; stores of FP8 would make them take more.
        index = tl.max_contiguous(row[:, None] * COLS + col[None, :], [1, vector])
        value = load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, "")
        if STEPS == 1:
            gain = load_gain(weight_ptr, col, col_mask, ZERO_CENTERED)
            if bias_ptr is not None:
                bias = load_fp32(bias_ptr + col, col_mask, "evict_last")
        if mean_ptr is not None:
            mean = tl.sum(value, axis=1) / COLS
            tl.store(mean_ptr + row, mean)
            value -= mean[:, None]
            if COLS != BLOCK_COLS:
                value = tl.where(mask, value, 0.0)
        rstd = tl.rsqrt(tl.sum(value * value, axis=1) / COLS + eps)
        tl.store(rstd_ptr + row, rstd)
        value = value * rstd[:, None] * gain[None, :]
        if bias_ptr is not None:
            value += bias[None, :]
        if amax_ptr is not None:
            largest = larger_magnitude(largest, _peaks(value, vector))
        if out_ptr is not None:
            tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask)
        if rowwise_ptr is not None:
            q = (value * scale).to(rowwise_ptr.dtype.element_ty)
            tl.store(rowwise_ptr + index, q, mask, eviction_policy=ROWWISE_POLICY)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


@jit
def _clear_kernel(
    arrived_ptr,  # counters [n], int32, set to 0
    n,
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
    BLOCK: tl.constexpr,  # counters of one program
):
    """Clear counters of arrivals."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # they wait for what is written here
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(arrived_ptr + index, 0, index < n)


@jit
def _row_kernel(
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
    arrived_ptr,  # programs that have normalized their rows of each band [bands], int32; None: no transpose
    rows,
    eps,  # added to the variance
    COLS: tl.constexpr,  # columns of x
    ZERO_CENTERED: tl.constexpr,  # the gain is 1 + weight
    BLOCK_ROWS: tl.constexpr,  # rows that a program normalizes at a time
    BLOCK_COLS: tl.constexpr,  # COLS, rounded up to a power of two
    STAGES: tl.constexpr,  # such blocks of rows on their way from memory at a time
    STEPS: tl.constexpr,  # such blocks of one program
    ROWWISE_POLICY: tl.constexpr,  # how the L2 cache treats rowwise bytes
    BAND: tl.constexpr,  # rows that are transposed together, as in `Schedule`
    TRANSPOSE_COLS: tl.constexpr,  # columns of them that one program transposes
    DELAY: tl.constexpr,  # bands between a band's rows and its transpose
    WHOLE: tl.constexpr,  # rows of both FP8 outputs start at multiples of 16 bytes, as by `is_whole`
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
):
    """Normalize some rows, or transpose a tile of those that other programs have normalized.

    With a columnwise output there is always a rowwise one, which may be temporary.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    rows_each: tl.constexpr = STEPS * BLOCK_ROWS
    normalizing: tl.constexpr = BAND // rows_each
    transposing: tl.constexpr = 0 if columnwise_ptr is None else (COLS + TRANSPOSE_COLS - 1) // TRANSPOSE_COLS
    band = (tl.program_id(0) // (normalizing + transposing)).to(tl.int64)
    place = tl.program_id(0) % (normalizing + transposing)
    first = band * BAND + place * rows_each
    if (place < normalizing) & (first < rows):
        _normalize(
            *(first, x_ptr, residual_ptr, weight_ptr, bias_ptr, summed_ptr, mean_ptr, rstd_ptr, out_ptr),
            *(rowwise_ptr, scale_ptr, amax_ptr, rows, eps),
            *(COLS, ZERO_CENTERED, BLOCK_ROWS, BLOCK_COLS, STAGES, STEPS, ROWWISE_POLICY),
        )
        if columnwise_ptr is not None:
            tl.debug_barrier()  # after the stores of all threads
            tl.atomic_add(arrived_ptr + band, 1, sem="release")
    if columnwise_ptr is not None:
        band -= DELAY
        if (place >= normalizing) & (band >= 0):
            expected = tl.cdiv(tl.minimum(rows - band * BAND, BAND), rows_each)
            arrived = tl.atomic_add(arrived_ptr + band, 0, sem="acquire")
            while arrived < expected:
                arrived = tl.atomic_add(arrived_ptr + band, 0, sem="acquire")
            transpose_tile(
                *(rowwise_ptr.to(tl.pointer_type(tl.uint8)), columnwise_ptr.to(tl.pointer_type(tl.uint8))),
                *(rows, COLS, band * BAND, (place - normalizing) * TRANSPOSE_COLS),
                *(WHOLE, BAND, TRANSPOSE_COLS),
            )


def launch(tensors: NormTensors, eps: float, zero_centered: bool) -> None:
    x, columnwise = tensors.x, tensors.columnwise
    rows, cols = x.shape
    tile = row_tile(x.dtype, cols, rms=tensors.mean is None, is_transposed=columnwise is not None)
    order = schedule(rows, cols, tile, is_transposed=columnwise is not None)
    is_early = starts_early(x.device)
    arrived, is_aligned = None, False
    if columnwise is not None:
        rowwise = columnwise.new_empty(rows, cols) if tensors.rowwise is None else tensors.rowwise
        tensors = tensors._replace(rowwise=rowwise)
        bands = cdiv(rows, order.band)
        arrived = x.new_empty(bands, dtype=torch.int32)
        _prepared_clear(bands, is_early)(arrived)
        is_aligned = is_whole(rowwise, columnwise)
    policy = "" if columnwise is None else KEPT
    start = _prepared_rows(rows, eps, cols, zero_centered, tile, policy, order, is_aligned, is_early)
    start(*tensors, arrived)


@for_each_shape
def _prepared_clear(bands: int, is_early: bool) -> PreparedKernel:
    return PreparedKernel(
        _clear_kernel, (cdiv(bands, CLEARED),), bands, is_early, CLEARED, launch_pdl=is_early
    )


@for_each_shape
def _prepared_rows(
    rows: int,
    eps: float,
    cols: int,
    zero_centered: bool,
    tile: Tile,
    policy: str,
    order: Schedule,
    is_aligned: bool,
    is_early: bool,
) -> PreparedKernel:
    return PreparedKernel(
        _row_kernel,
        (order.programs,),
        *(rows, eps, cols, zero_centered, tile.rows, tile.cols, tile.stages, tile.steps),
        *(policy, order.band, order.cols, order.delay, is_aligned, is_early),
        **tile.options,
        launch_pdl=is_early,
    )
