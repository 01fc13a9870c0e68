"""LayerNorm and RMSNorm of many rows, straight to FP8 by rows and by columns.

A program takes 32 rows at a time, because memory transfers at least 32 bytes of a column, and keeps their FP8
bytes in shared memory until it stores the columns.  It normalizes them in four sweeps of eight rows:

    start the copy of the next sweep's rows to shared memory
    find mean and rstd of these, in FP32, by two passes over registers
    y = (x - mean) * rstd * weight + bias, its amax, and its FP8 bytes, to memory and to shared memory
    after four sweeps: words of the bytes of four rows, to columns

Sweep s has rows 4 w + s, for w from 0 to 7, so that equal places of all sweeps' bytes are four neighbours of
a column.  A thread has the same columns in all rows, so its weights stay in registers; from shared memory
they would be more than half of its traffic.  The L2 cache is asked to keep columns, the rest of which
neighbouring programs store.

Bytes per element: 4 for bf16, of which memory sees 4.  It is written in Gluon, Triton's language of explicit
layouts, which has no interpreter; other inputs go to the other kernels of `norm_forward`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flatfsdp.kernels.norm.tensors import NormTensors
from flatfsdp.kernels.shared.outputs import starts_early
from flatfsdp.kernels.shared.tiles import MULTIPROCESSORS
from flatfsdp.kernels.shared.triton import (
    POINTER_ALIGNMENT,
    PreparedKernel,
    async_copy,
    cdiv,
    for_each_shape,
    gl,
    gluon_jit,
    tl,
)

WARPS = 8
ROWS = 32
"""Number of rows that a program takes at a time."""
WIDTHS = (2048, 4096)
"""Supported numbers of columns; a program keeps 48 bytes of each column in shared memory."""
LEAST_BUSY = 0.9
"""Smallest share of multiprocessors that have work until the end."""
MOST_ELEMENTS = 2**31
"""Largest number of elements of x: their indices are 32-bit numbers."""


def fits(tensors: NormTensors) -> bool:
    """Whether this kernel supports these tensors, and is faster than that of `rows.py`."""
    x, columnwise = tensors.x, tensors.columnwise
    if columnwise is None or tensors.residual is not None or tensors.out is not None:
        return False
    if not (is_good_shape(*x.shape) and _is_hopper(x.device)):
        return False
    inputs = [tensor for tensor in (x, tensors.weight, tensors.bias) if tensor is not None]
    are_taken = all(_is_taken(tensor, torch.bfloat16) for tensor in inputs)
    return are_taken and _is_taken(columnwise, torch.float8_e4m3fn)


def is_good_shape(rows: int, cols: int) -> bool:
    """Whether this kernel supports the shape, and keeps enough multiprocessors busy."""
    rounds = cdiv(rows // ROWS, MULTIPROCESSORS)
    are_busy = rows // ROWS >= LEAST_BUSY * rounds * MULTIPROCESSORS
    return are_busy and cols in WIDTHS and rows % ROWS == 0 and 0 < rows * cols <= MOST_ELEMENTS


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; most others have half the shared memory, or less."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _is_taken(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.data_ptr() % POINTER_ALIGNMENT == 0


@gluon_jit
def _even(pairs):
    """The first of two bf16 numbers in an int32 word, as FP32."""
    return (pairs << 16).to(gl.float32, bitcast=True)


@gluon_jit
def _odd(pairs):
    """The second of them, as FP32."""
    return (pairs & -65536).to(gl.float32, bitcast=True)


@gluon_jit
def _larger_magnitude(largest, value):
    """The larger of `largest`, which is not negative, and |value|; NaN wins."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 m; abs.f32 m, $2; max.NaN.f32 $0, $1, m;}",
        "=f,f,f",
        [largest, value],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon_jit
def _to_fp8(even, odd):
    """Pairs of E4M3 bytes, saturated; NaN stays NaN.  Two pairs fill a register."""
    return gl.inline_asm_elementwise(
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; mov.b32 $0, {a, b};}",
        "=r,f,f,f,f",
        [even, odd],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon_jit
def _pick(low, high, WHICH: gl.constexpr):
    """Pick four of the eight bytes of two words, by the hexadecimal digits of `WHICH`, the last one first."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + WHICH + ";",
        "=r,r,r",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon_jit
def _start_reading(
    slots,  # shared memory for each part of a row, [8, pairs] of int32 words
    x_ptr,  # x as int32 words, each of a pair of bf16 numbers
    first,  # index of the sweep's first row
    is_there,  # whether the sweep is: otherwise nothing is read
    row,  # the sweep's rows, beyond `first`
    pair,  # indices of pairs in the first part of a row
    PAIRS: gl.constexpr,  # pairs in a row of x
):
    """Start the copy of a sweep's rows to shared memory."""
    at = x_ptr + first * PAIRS + (row[:, None] * PAIRS + pair[None, :])
    mask = (row >= 0)[:, None] & (pair >= 0)[None, :] & is_there
    for part in gl.static_range(len(slots)):
        async_copy.async_copy_global_to_shared(
            slots[part], at + part * pair.shape[0], mask, cache_modifier=".cg"
        )
    async_copy.commit_group()


@gluon_jit
def _unpacked(parts):
    """The even numbers of each part, then the odd ones, as FP32."""
    return [_even(pairs) for pairs in parts] + [_odd(pairs) for pairs in parts]


@gluon_jit
def _load_weights(ptr, pair, parts):
    """A vector [cols] of bf16 numbers in the order of `_unpacked`."""
    at = ptr.to(gl.pointer_type(gl.int32), bitcast=True) + pair
    return _unpacked([gl.load(at + part * pair.shape[0]) for part in parts])


@gluon_jit
def _mean(values, COLS: gl.constexpr):
    """The mean of each row, whose parts are `values`."""
    total = values[0]
    for i in gl.static_range(1, len(values)):
        total += values[i]
    return gl.sum(total, 1) / COLS


@gluon_jit
def _weighted(value, gain, bias, ZERO_CENTERED: gl.constexpr):
    """A part of the rows, times the gain, plus the bias unless it is None."""
    value *= (gain + 1.0 if ZERO_CENTERED else gain)[None, :]
    if bias is not None:
        value += bias[None, :]
    return value


@gluon_jit
def _store_columns(
    pairs,  # shared memory [4, 8, pairs], int16: pairs of FP8 bytes of four sweeps
    columnwise_ptr,  # where these rows and columns begin in y transposed, as int32 words
    rows,  # rows of x
    LAYOUT: gl.constexpr,  # layout of words in registers
    SHARED: gl.constexpr,  # layout of the same bytes, as words, in shared memory
):
    """Transpose the bytes of 32 rows and store them."""
    words: gl.constexpr = pairs.shape[2] // 2
    sweeps = pairs._reinterpret(gl.int32, [4, 8, words], SHARED)
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, words, layout=gl.SliceLayout(0, LAYOUT))
    first, second = sweeps.index(0).load(LAYOUT), sweeps.index(1).load(LAYOUT)
    third, fourth = sweeps.index(2).load(LAYOUT), sweeps.index(3).load(LAYOUT)
    # Rows 0 and 1 of columns 0 and 1, and so on; then rows 0 to 3 of a column.
    upper, upper_right = _pick(first, second, "0x5140"), _pick(first, second, "0x7362")
    lower, lower_right = _pick(third, fourth, "0x5140"), _pick(third, fourth, "0x7362")
    stride = rows // 4
    at = columnwise_ptr + word[None, :] * (4 * stride) + w[:, None]
    gl.store(at, _pick(upper, lower, "0x5410"), eviction_policy="evict_last")
    gl.store(at + stride, _pick(upper, lower, "0x7632"), eviction_policy="evict_last")
    gl.store(at + 2 * stride, _pick(upper_right, lower_right, "0x5410"), eviction_policy="evict_last")
    gl.store(at + 3 * stride, _pick(upper_right, lower_right, "0x7632"), eviction_policy="evict_last")


@gluon_jit
def _kernel(
    x_ptr,  # input [rows, COLS], bf16
    weight_ptr,  # [COLS], bf16
    bias_ptr,  # [COLS], bf16, or None
    mean_ptr,  # mean of each row [rows], FP32; None for RMSNorm, which subtracts none
    rstd_ptr,  # reciprocal standard deviation of each row [rows], FP32
    rowwise_ptr,  # y scaled [rows, COLS], E4M3; None: not written
    columnwise_ptr,  # its transpose [COLS, rows], E4M3
    scale_ptr,  # what y is multiplied by, one FP32 number
    amax_ptr,  # raised to max |y|, one FP32 number, or None
    rows,  # a multiple of 32
    eps,  # added to the variance
    COLS: gl.constexpr,  # one of `WIDTHS`
    ZERO_CENTERED: gl.constexpr,  # the gain is 1 + weight
    WARPS: gl.constexpr,  # warps of a program
    IS_EARLY: gl.constexpr,  # launched by PDL: wait for the kernel before
):
    """Normalize, cast and transpose 32 rows at a time, as the module's docstring describes."""
    # A warp has 128 pairs of all eight rows at a time; later, 16 words of columns and 32 rows.
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, WARPS], [1, 0])
    BY_COLUMNS: gl.constexpr = gl.BlockedLayout([4, 1], [2, 16], [1, WARPS], [0, 1])
    # Half a warp's words of rows 4 to 7 are 64 bytes beside those of rows 0 to 3: in other banks.
    PAIRS_APART: gl.constexpr = gl.SwizzledSharedLayout(32, 4, 2, [1, 0])
    WORDS_APART: gl.constexpr = gl.SwizzledSharedLayout(16, 4, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PAIRS: gl.constexpr = COLS // 2
    WIDTH: gl.constexpr = 128 * WARPS
    ODD: gl.constexpr = PAIRS // WIDTH  # where odd numbers begin in lists

    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    columnwise_ptr = columnwise_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    pair = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, BY_ROWS))
    row = 4 * gl.arange(0, 8, layout=gl.SliceLayout(1, BY_ROWS))

    # A buffer for each part of a row: what goes to one need not wait for what is read of another.
    parts = (0,) if PAIRS == WIDTH else (0, 1)
    slots = [gl.allocate_shared_memory(gl.int32, [8, WIDTH], PLAIN) for _ in parts]
    written = [gl.allocate_shared_memory(gl.int16, [4, 8, WIDTH], PAIRS_APART) for _ in parts]
    begin = gl.program_id(0) * 32
    stride = gl.num_programs(0) * 32
    _start_reading(slots, x_ptr, begin, True, row, pair, PAIRS)
    scale = gl.load(scale_ptr)
    gains = _load_weights(weight_ptr, pair, parts)
    biases = [None for _ in gains] if bias_ptr is None else _load_weights(bias_ptr, pair, parts)
    largest = gl.zeros([8, WIDTH], gl.float32, BY_ROWS)

    for top in range(begin, rows, stride):
        for sweep in range(4):
            first = top + sweep
            async_copy.wait_group(0)
            values = _unpacked([slot.load(BY_ROWS) for slot in slots])
            following = gl.where(sweep == 3, top + stride, first + 1)
            _start_reading(slots, x_ptr, following, following < rows, row, pair, PAIRS)

            if mean_ptr is not None:
                mean = _mean(values, COLS)
                gl.store(mean_ptr + first + row, mean)
                values = [value - mean[:, None] for value in values]
            rstd = gl.rsqrt(_mean([value * value for value in values], COLS) + eps)
            gl.store(rstd_ptr + first + row, rstd)
            values = [value * rstd[:, None] for value in values]
            if rowwise_ptr is not None:
                to = rowwise_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
                to += first * PAIRS + (row[:, None] * PAIRS + pair[None, :])
            for part in gl.static_range(len(parts)):
                even = _weighted(values[part], gains[part], biases[part], ZERO_CENTERED)
                odd = _weighted(values[ODD + part], gains[ODD + part], biases[ODD + part], ZERO_CENTERED)
                if amax_ptr is not None:
                    largest = _larger_magnitude(_larger_magnitude(largest, even), odd)
                q = _to_fp8(even * scale, odd * scale)
                if rowwise_ptr is not None:
                    gl.store(to + part * WIDTH, q)
                written[part].index(sweep).store(q)
        for part in gl.static_range(len(parts)):
            corner = columnwise_ptr + part * (WIDTH // 2) * rows + top // 4
            _store_columns(written[part], corner, rows, BY_COLUMNS, WORDS_APART)
    if amax_ptr is not None:
        bits = gl.max(gl.max(largest.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
        gl.atomic_max(amax_ptr.to(gl.pointer_type(gl.int32), bitcast=True), bits, sem="relaxed")


def launch(tensors: NormTensors, eps: float, zero_centered: bool) -> None:
    x, _, weight, bias, _, mean, rstd, _, *outputs = tensors
    _prepared(*x.shape, eps, zero_centered, starts_early(x.device))(x, weight, bias, mean, rstd, *outputs)


@for_each_shape
def _prepared(rows: int, cols: int, eps: float, zero_centered: bool, is_early: bool) -> PreparedKernel:
    rounds = cdiv(rows // ROWS, MULTIPROCESSORS)
    return PreparedKernel(
        _kernel,
        (cdiv(rows // ROWS, rounds),),
        *(rows, eps, cols, zero_centered, WARPS, is_early),
        num_warps=WARPS,
        launch_pdl=is_early,
    )
