"""LayerNorm and RMSNorm, with the addition of a residual before and the cast to FP8 after, in one kernel.

    summed = x + residual                          rounded to x's dtype: what later layers, and the norm, see
    mean = sum(summed) / n                         LayerNorm; RMSNorm subtracts nothing
    rstd = 1 / sqrt(sum((summed - mean)^2) / n + eps)
    y = (summed - mean) * rstd * weight + bias     1 + weight in place of weight if `zero_centered`

LayerNorm is by Ba et al. (2016), RMSNorm by Zhang and Sennrich (2019); `zero_centered` is Transformer
Engine's `zero_centered_gamma`.  Statistics are FP32, by two passes over a row or by merged blocks (Chan et
al., 1979), so that a large mean costs no digits.

Bytes per element of p bytes: p read, 2 p more with a residual, p written in high precision, 1 for each FP8
form.

A program keeps whole rows in registers.  For a columnwise output there are other programs between those, each
of which transposes a tile of rowwise bytes, from the L2 cache, when all rows of the tile's band have arrived:
5 bytes an element in place of 4 for bf16, of which memory sees 4.  (To transpose by itself, a program would
have to hold 32 rows, as memory takes no less than 32 bytes at a time; and to read x twice costs more.)  They
come some bands later and so rarely wait.  They wait for programs of smaller numbers only, and a GPU starts
programs in the order of their numbers, which the scans of NVIDIA's CUB rely on, too: none waits for ever.

Rows too wide for registers are read twice, by another kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import (
    HIGH_DTYPES,
    allocate_outputs,
    check_input,
    check_like,
    record_amax,
    starts_early,
    store_outputs,
    write_outputs,
)
from flatfsdp.kernels._pairs import larger_magnitude, widened
from flatfsdp.kernels._tiles import Tile, find, power_of_two
from flatfsdp.kernels._triton import Launch, cdiv, for_each_shape, jit, tl
from flatfsdp.kernels.cast import is_whole, transpose_tile
from torch import Tensor

WIDEST_ROW = 16384
"""Columns of the widest row that a program keeps in registers."""
CLEARED = 256
"""Counters of arrivals that one program clears."""
KEPT = "evict_last"
"""How the L2 cache treats rowwise bytes that will be transposed."""


class NormForward(NamedTuple):
    """Results of `norm_forward`; None where not asked for."""

    out: Tensor | None
    rowwise: Tensor | None
    columnwise: Tensor | None
    summed: Tensor
    mean: Tensor | None
    rstd: Tensor


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


def wide_tile(dtype: torch.dtype, cols: int) -> Tile:
    tile = find("wide_norm", dtype, cols)
    return tile._replace(cols=min(tile.cols, max(16, power_of_two(cols))))


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    value = x.float()
    if residual is not None and summed is not None:
        value = summed.copy_(value + residual.float()).float()
    if mean is not None:
        mean.copy_(value.mean(1))
        value = value - mean[:, None]
    rstd.copy_(1 / torch.sqrt(value.square().mean(1) + eps))
    gain = weight.float() + 1 if zero_centered else weight.float()
    value = value * rstd[:, None] * gain
    if bias is not None:
        value = value + bias.float()
    write_outputs(value, out, rowwise, columnwise, scale, amax)


@jit
def _load(pointers, mask, POLICY: tl.constexpr):
    """FP32, and 0 where masked."""
    if mask is None:
        value = tl.load(pointers, eviction_policy=POLICY)
    else:
        value = tl.load(pointers, mask, 0.0, eviction_policy=POLICY)
    return widened(value)


@jit
def _load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, POLICY: tl.constexpr):
    """x, or x + residual rounded to x's dtype and stored; as FP32."""
    x = _load(x_ptr + index, mask, POLICY)
    if residual_ptr is not None:
        total = (x + _load(residual_ptr + index, mask, POLICY)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + index, total, mask)
        x = widened(total)
    return x


@jit
def _gain(weight_ptr, col, mask, ZERO_CENTERED: tl.constexpr):
    weight = _load(weight_ptr + col, mask, "evict_last")
    if ZERO_CENTERED:
        weight += 1.0
    return weight


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
        gain = _gain(weight_ptr, col, col_mask, ZERO_CENTERED)
        if bias_ptr is not None:
            bias = _load(bias_ptr + col, col_mask, "evict_last")
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    largest = tl.zeros([BLOCK_COLS // vector], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        # Below the last row, the last row again: the same numbers go to the same place.
        row = tl.minimum(first + step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), rows - 1)
        # Threads take 16 bytes of x each, as loads like it; stores of FP8 would make them take more.
        index = tl.max_contiguous(row[:, None] * COLS + col[None, :], [1, vector])
        value = _load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, "")
        if STEPS == 1:
            gain = _gain(weight_ptr, col, col_mask, ZERO_CENTERED)
            if bias_ptr is not None:
                bias = _load(bias_ptr + col, col_mask, "evict_last")
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


@jit
def _wide_kernel(
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
    rows,
    eps,
    COLS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A band of rows, block by block, twice; the second time backwards, from what the cache holds."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < rows
    mean = tl.zeros([BLOCK_ROWS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, COLS, BLOCK_COLS, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = row_mask[:, None] & (col < COLS)[None, :]
        value = _load_summed(
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
        value = _load(again_ptr + row[:, None] * COLS + col[None, :], mask, "evict_first")
        value = (value - mean[:, None]) * rstd[:, None]
        value *= _gain(weight_ptr, col, col_mask, ZERO_CENTERED)[None, :]
        if bias_ptr is not None:
            value += _load(bias_ptr + col, col_mask, "evict_last")[None, :]
        if amax_ptr is not None:
            inside = tl.where(mask, tl.abs(value), 0.0)
            largest = tl.maximum(largest, inside, propagate_nan=tl.PropagateNan.ALL)
        store_outputs(value, row, col, rows, COLS, mask, out_ptr, rowwise_ptr, columnwise_ptr, scale_ptr)
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    rows, cols = x.shape
    tensors = (residual, weight, bias, summed, mean, rstd, out)
    if cols > WIDEST_ROW:
        start = _wide_launch(rows, eps, cols, zero_centered, wide_tile(x.dtype, cols))
        start(x, *tensors, rowwise, columnwise, scale, amax)
        return
    tile = row_tile(x.dtype, cols, rms=mean is None, is_turned=columnwise is not None)
    parts, is_early = mix(rows, cols, tile, is_turned=columnwise is not None), starts_early(x.device)
    arrived, is_aligned = None, False
    if columnwise is not None:
        if rowwise is None:
            rowwise = columnwise.new_empty(rows, cols)
        bands = cdiv(rows, parts.band)
        arrived = x.new_empty(bands, dtype=torch.int32)
        _clear_launch(bands, is_early)(arrived)
        is_aligned = is_whole(rowwise, columnwise)
    policy = "" if columnwise is None else KEPT
    start = _row_launch(rows, eps, cols, zero_centered, tile, policy, parts, is_aligned, is_early)
    start(x, *tensors, rowwise, columnwise, scale, amax, arrived)


@for_each_shape
def _wide_launch(rows: int, eps: float, cols: int, zero_centered: bool, tile: Tile) -> Launch:
    return Launch(
        _wide_kernel,
        (cdiv(rows, tile.rows),),
        *(rows, eps, cols, zero_centered, tile.rows, tile.cols, tile.stages),
        **tile.options,
    )


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


_norm_forward = operator(
    "norm_forward_(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor(a!)? summed, "
    "Tensor(b!)? mean, Tensor(c!) rstd, Tensor(d!)? out, Tensor(e!)? rowwise, Tensor(f!)? columnwise, "
    "Tensor? scale, Tensor(g!)? amax, float eps, bool zero_centered) -> ()",
    reference=reference,
    launch=launch,
)


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    high_precision: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
) -> NormForward:
    """Normalizes the rows of x, or of x + residual.

    Args:
        x: [rows, cols], FP32, FP16 or bf16, contiguous; so is `residual`, of x's dtype.
        weight, bias: [cols] in any of these dtypes; bias may be None.
        rms: RMSNorm, which has no bias, in place of LayerNorm.
        zero_centered: the gain is 1 + weight.
        scale: FP32, one element: what values are multiplied by before the cast to FP8.
        amax: FP32, one element, becomes max(amax, max |y|) of the FP32 result, unscaled.
        dtype: float8_e4m3fn or float8_e5m2, for the outputs that `rowwise` and `columnwise` ask for.
        high_precision: whether y is wanted in x's dtype.

    Returns:
        `out` [rows, cols] in x's dtype, `rowwise` [rows, cols] and `columnwise` [cols, rows] in FP8; `summed`
        in x's dtype (x itself without a residual); `mean` (None if `rms`) and `rstd`, FP32 [rows].

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    rows, cols = x.shape
    if rms and bias is not None:
        raise ValueError("RMSNorm has no bias: pass bias=None, or rms=False for LayerNorm")
    check_like("residual", residual, x, (rows, cols), x.dtype)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_like(name, tensor, x, (cols,), tensor.dtype if tensor.dtype in HIGH_DTYPES else x.dtype)
    outputs = allocate_outputs(
        x,
        cols,
        scale=scale,
        amax=amax,
        dtype=dtype,
        high_precision=high_precision,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    summed = None if residual is None else torch.empty_like(x)
    mean = None if rms else x.new_empty(rows, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    _norm_forward(
        x, residual, weight, bias, summed, mean, rstd, *outputs, scale, amax, eps, zero_centered
    )  # fmt: skip
    if summed is None:
        summed = x
    return NormForward(outputs.out, outputs.rowwise, outputs.columnwise, summed, mean, rstd)
