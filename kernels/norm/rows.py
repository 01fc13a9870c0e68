"""A norm whose programs keep whole rows in registers.

For a columnwise output there are other programs between those, each of which transposes a tile of rowwise
bytes, from the L2 cache, when all rows of the tile's band have arrived: 5 bytes an element in place of 4 for
bf16, of which memory sees 4.  (To transpose by itself, a program would have to hold 32 rows, as memory takes
no less than 32 bytes at a time: `norm_transposed` does, where it can.)  They come some bands later and so
rarely wait.  They wait for programs of smaller numbers only, and a GPU starts programs in the order of their
numbers, which the scans of NVIDIA's CUB rely on, too: none waits for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flatfsdp.kernels.cast.transpose import is_whole, transpose_tile
from flatfsdp.kernels.norm.tensors import NormTensors, load_gain, load_summed, load_wide
from flatfsdp.kernels.shared.outputs import record_amax, starts_early
from flatfsdp.kernels.shared.pairs import larger_magnitude
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import Launch, cdiv, for_each_shape, jit, tl

CLEARED = 256
"""Counters of arrivals that one program clears."""
KEPT = "evict_last"
"""How the L2 cache treats rowwise bytes that will be transposed."""


def row_tile(dtype: torch.dtype, cols: int, *, rms: bool, is_turned: bool) -> Tile:
    """Whole rows; narrow ones more at a time, in fewer steps.

    Args:
        is_turned: whether other programs transpose.
    """
    kernel = "rms_norm" if rms else "layer_norm"
    tile = find(f"{kernel}, transpose" if is_turned else kernel, dtype, cols)
    width = max(16, power_of_two(cols))
    times = max(1, tile.cols // width)
    return tile._replace(rows=tile.rows * times, cols=width, steps=max(1, tile.steps // times))


class Turning(NamedTuple):
    """How programs transpose what others have normalized.

    Attributes:
        band: rows that are transposed together: as many bytes of a column are stored side by side.
        bytes: of each thread.
        warps: under way between rows and their transpose, so that it need not wait.  An H200 holds up to 8448
            at a time, and fewer of a kernel with many registers.
    """

    band: int
    bytes: int
    warps: int


TURNING = Turning(band=64, bytes=64, warps=6144)
SLIM_TURNING = Turning(band=128, bytes=128, warps=4224)
"""For programs of few warps, if there are many: as many bytes of a program, and half as many programs."""
SLIM_WARPS = 4
"""Of a program, at most, for `SLIM_TURNING`."""
MANY_ELEMENTS = 2**25
"""From here on there are enough programs for `SLIM_TURNING`."""


def turning(rows: int, cols: int, tile: Tile) -> Turning:
    is_slim = tile.warps <= SLIM_WARPS and rows * cols >= MANY_ELEMENTS
    return SLIM_TURNING if is_slim else TURNING


class Mix(NamedTuple):
    """How programs that transpose follow those that normalize.

    Attributes:
        programs: of both kinds.
        band: rows that are transposed together.
        cols: of the tile that one program transposes.
        delay: bands between a band's rows and its transpose.
    """

    programs: int
    band: int
    cols: int = 1
    delay: int = 0


def mix(rows: int, cols: int, tile: Tile, *, is_turned: bool) -> Mix:
    rows_each = tile.rows * tile.steps
    if not is_turned:
        return Mix(cdiv(rows, rows_each), rows_each)
    turns = turning(rows, cols, tile)
    band = max(turns.band, rows_each)
    turned_cols = max(1, turns.bytes * 32 * tile.warps // band)
    programs = band // rows_each + cdiv(cols, turned_cols)
    bands = cdiv(rows, band)
    delay = min(bands, cdiv(turns.warps, programs * tile.warps))
    return Mix((bands + delay) * programs, band, turned_cols, delay)


@jit
def _peaks(value, VECTOR: tl.constexpr):
    """The largest magnitudes in a column of `value` and its neighbours, [cols / VECTOR]."""
    of_columns = tl.reduce(value, 0, larger_magnitude)
    return tl.reduce(tl.reshape(of_columns, [value.shape[1] // VECTOR, VECTOR]), 1, larger_magnitude)


@jit
def _normalize(
    first,
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
    """What one program does with its rows, of which `first` is the first."""
    col = tl.arange(0, BLOCK_COLS)
    # None where there is nothing to mask: masks cost an instruction an element, at several places.
    col_mask = None if COLS == BLOCK_COLS else col < COLS
    mask = None if COLS == BLOCK_COLS else (col < COLS)[None, :]
    vector: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    if STEPS > 1:
        gain = load_gain(weight_ptr, col, col_mask, ZERO_CENTERED)
        if bias_ptr is not None:
            bias = load_wide(bias_ptr + col, col_mask, "evict_last")
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    largest = tl.zeros([BLOCK_COLS // vector], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        # Below the last row, the last row again: the same numbers go to the same place.
        row = tl.minimum(first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), rows - 1)
        # Threads take 16 bytes of x each, as loads like it; stores of FP8 would make them take more.
        index = tl.max_contiguous(row[:, None] * COLS + col[None, :], [1, vector])
        value = load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, "")
        if STEPS == 1:
            gain = load_gain(weight_ptr, col, col_mask, ZERO_CENTERED)
            if bias_ptr is not None:
                bias = load_wide(bias_ptr + col, col_mask, "evict_last")
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
def _clear_kernel(arrived_ptr, n, IS_EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # they wait for what is written here
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(arrived_ptr + index, 0, index < n)


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
    arrived_ptr,
    rows,
    eps,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    ROWWISE_POLICY: tl.constexpr,
    BAND: tl.constexpr,
    TURNED_COLS: tl.constexpr,
    DELAY: tl.constexpr,
    WHOLE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    rows_each: tl.constexpr = STEPS * BLOCK_ROWS
    normalizing: tl.constexpr = BAND // rows_each
    turning: tl.constexpr = 0 if columnwise_ptr is None else (COLS + TURNED_COLS - 1) // TURNED_COLS
    band = (tl.program_id(0) // (normalizing + turning)).to(tl.int64)
    place = tl.program_id(0) % (normalizing + turning)
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
                *(rows, COLS, band * BAND, (place - normalizing) * TURNED_COLS, WHOLE, BAND, TURNED_COLS),
            )


def launch(tensors: NormTensors, eps: float, zero_centered: bool) -> None:
    x, columnwise = tensors.x, tensors.columnwise
    rows, cols = x.shape
    tile = row_tile(x.dtype, cols, rms=tensors.mean is None, is_turned=columnwise is not None)
    parts, is_early = mix(rows, cols, tile, is_turned=columnwise is not None), starts_early(x.device)
    arrived, is_aligned = None, False
    if columnwise is not None:
        rowwise = columnwise.new_empty(rows, cols) if tensors.rowwise is None else tensors.rowwise
        tensors = tensors._replace(rowwise=rowwise)
        bands = cdiv(rows, parts.band)
        arrived = x.new_empty(bands, dtype=torch.int32)
        _clear_launch(bands, is_early)(arrived)
        is_aligned = is_whole(rowwise, columnwise)
    policy = "" if columnwise is None else KEPT
    start = _row_launch(rows, eps, cols, zero_centered, tile, policy, parts, is_aligned, is_early)
    start(*tensors, arrived)


@for_each_shape
def _clear_launch(bands: int, is_early: bool) -> Launch:
    return Launch(_clear_kernel, (cdiv(bands, CLEARED),), bands, is_early, CLEARED, launch_pdl=is_early)


@for_each_shape
def _row_launch(
    rows: int,
    eps: float,
    cols: int,
    zero_centered: bool,
    tile: Tile,
    policy: str,
    parts: Mix,
    is_aligned: bool,
    is_early: bool,
) -> Launch:
    return Launch(
        _row_kernel,
        (parts.programs,),
        *(rows, eps, cols, zero_centered, tile.rows, tile.cols, tile.stages, tile.steps),
        *(policy, parts.band, parts.cols, parts.delay, is_aligned, is_early),
        **tile.options,
        launch_pdl=is_early,
    )
