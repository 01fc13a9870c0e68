"""Bias, dropout and residual in one pass; the mask is a function of a seed and is not stored.

    out = residual + keep * (x + bias) / (1 - p)          rounded once
    dx = keep * dy / (1 - p),  dbias = sum of dx over rows, in FP32

Element (r, c) of [rows, cols] uses half word c % 8, lower halves first, of the four words that Philox-4x32-10
(Salmon et al., 2011) computes from the key `seed` and the counter r * ceil(cols / 8) + c // 8, in the order
of tl.randint4x.  It is kept if these 16 bits are at least p * 2^16, rounded.  So CPU and GPU drop the same
elements. The seed is read on the device, so a CUDA graph draws anew in every replay.

Bytes per element of p bytes: 3 p forward (2 p without residual), 2 p backward.  Eight elements share one
Philox call of ten rounds: with a word for each of them, arithmetic and not memory is the limit.

Arguments shared by both kernels:

        threshold                 an element is kept if its 16 random bits are at least this, uint32
    factor                    1 / (1 - p)
    seed_ptr                  Philox key, int64 []
    rows, cols                size of x and dy
    BLOCK_ROWS, BLOCK_COLS    size of a tile; columns are a multiple of 8
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import check_input, check_like, fold, rows_at_once, sum_bands, vector_of
from flatfsdp.kernels.shared.tiles import find
from flatfsdp.kernels.shared.triton import cdiv, jit, on_device_of, tl

WORDS = 4
"""Number of words that Philox computes from a counter."""
ELEMENTS = 2 * WORDS
"""Number of elements that share a counter."""
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
LOW_HALF = 0xFFFF


class DropoutBackward(NamedTuple):
    """Gradients: dx [rows, cols] in dy's dtype; dbias FP32 [cols], None if not requested."""

    dx: Tensor
    dbias: Tensor | None


def threshold(p: float) -> int:
    """Smallest value of 16 random bits with which an element is kept."""
    return min(round(p * 2**16), 2**16 - 1)


def philox(seed: Tensor, counter: Tensor) -> Tensor:
    """Philox-4x32-10 in plain PyTorch: int64 counters [...] to words, int64 [..., 4], each below 2^32.

    The seed is the key, int64 [].

    Multiplications wrap around modulo 2^64, so an arithmetic shift and a mask give their upper halves
    exactly.
    """
    c0, c1 = counter & LOW, (counter >> 32) & LOW
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((product_1 >> 32) & LOW) ^ c1 ^ k0, ((product_0 >> 32) & LOW) ^ c3 ^ k1
        c1, c3 = product_1 & LOW, product_0 & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return torch.stack([c0, c1, c2, c3], -1)


def keep_mask(like: Tensor, p: float, seed: Tensor) -> Tensor:
    """Mask of the kept elements of `like`, [rows, cols], in plain PyTorch; bool."""
    rows, cols = like.shape
    counters = cdiv(cols, ELEMENTS)
    words = philox(seed, torch.arange(rows * counters, device=like.device))
    halves = torch.stack([words & LOW_HALF, words >> 16], -1)
    return halves.view(rows, counters * ELEMENTS)[:, :cols] >= threshold(p)


def forward_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, out: Tensor, p: float
) -> None:
    value = x.float() if bias is None else x.float() + bias.float()
    if seed is not None:
        value = torch.where(keep_mask(x, p, seed), value * (1 / (1 - p)), 0.0)
    out.copy_(value if residual is None else residual.float() + value)


def backward_reference(dy: Tensor, seed: Tensor, dx: Tensor, dbias: Tensor | None, p: float) -> None:
    value = torch.where(keep_mask(dy, p, seed), dy.float() * (1 / (1 - p)), 0.0)
    dx.copy_(value)
    if dbias is not None:
        dbias.copy_(value.sum(0))


@jit
def _philox(seed, counter):
    """Compute four words for each counter, uint32, bit-equal to those of tl.randint4x.

    One 64-bit multiplication replaces two 32-bit ones, for the upper and the lower half.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = c2
    for _ in tl.static_range(10):
        product_0, product_1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@jit
def _two_bits(words, threshold, AT: tl.constexpr):
    """Set bits AT and AT + 1: whether a word's lower half and its upper half reach the threshold."""
    # A half shifted to the top compares like the half alone; lower bits make no difference.
    limit = threshold << 16
    return ((words << 16) >= limit).to(tl.int32) << AT | (words >= limit).to(tl.int32) << AT + 1


@jit
def _keep(seed, threshold, row, first_col, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Mask of the kept elements of a tile; `row` are indices, `first_col` is a multiple of 8."""
    group = first_col // 8 + tl.arange(0, BLOCK_COLS // 8)
    counter = row[:, None] * tl.cdiv(cols, 8) + group[None, :]
    w0, w1, w2, w3 = _philox(seed, counter)
    bits = _two_bits(w0, threshold, 0) | _two_bits(w1, threshold, 2)
    bits |= _two_bits(w2, threshold, 4) | _two_bits(w3, threshold, 6)
    keep = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(keep, [BLOCK_ROWS, BLOCK_COLS]) != 0


@jit
def _forward_kernel(
    x_ptr,  # input [rows, cols], FP32, fp16 or bf16
    bias_ptr,  # [cols], x's dtype, or None
    residual_ptr,  # [rows, cols], x's dtype, or None
    seed_ptr,  # None: nothing is dropped
    out_ptr,  # result [rows, cols], x's dtype
    threshold: tl.uint32,
    factor,
    rows,
    cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Store one tile of the result."""
    across = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_col = (tl.program_id(0) % across) * BLOCK_COLS
    col = first_col + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    index = row[:, None] * cols + col[None, :]
    value = tl.load(x_ptr + index, mask, 0.0).to(tl.float32)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + col, col < cols, 0.0).to(tl.float32)[None, :]
    if seed_ptr is not None:
        keep = _keep(tl.load(seed_ptr), threshold, row, first_col, cols, BLOCK_ROWS, BLOCK_COLS)
        value = tl.where(keep, value * factor, 0.0)
    if residual_ptr is not None:
        value += tl.load(residual_ptr + index, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask)


@jit
def _backward_kernel(
    dy_ptr,  # gradient of the result [rows, cols], FP32, fp16 or bf16
    seed_ptr,
    dx_ptr,  # gradient of x [rows, cols], dy's dtype
    band_sums_ptr,  # sums over the rows of each program [bands, cols], FP32; None: not wanted
    threshold: tl.uint32,
    factor,
    rows,
    cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,  # tiles on their way from memory at a time
    STEPS: tl.constexpr,  # tiles of one program, one below the other
    SUM_ROWS: tl.constexpr,  # rows of partial sums, as by `fold`
):
    """Store the gradient of STEPS tiles, one below the other, and its sums over rows."""
    across = tl.cdiv(cols, BLOCK_COLS)
    band = (tl.program_id(0) // across).to(tl.int64)
    first_col = (tl.program_id(0) % across) * BLOCK_COLS
    col = first_col + tl.arange(0, BLOCK_COLS)
    col_mask = col < cols
    sums = tl.zeros([SUM_ROWS, BLOCK_COLS], tl.float32)
    seed = tl.load(seed_ptr)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (band * STEPS + step) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & col_mask[None, :]
        index = row[:, None] * cols + col[None, :]
        grad = tl.load(dy_ptr + index, mask, 0.0).to(tl.float32)
        keep = _keep(seed, threshold, row, first_col, cols, BLOCK_ROWS, BLOCK_COLS)
        grad = tl.where(keep, grad * factor, 0.0)
        tl.store(dx_ptr + index, grad.to(dx_ptr.dtype.element_ty), mask)
        if band_sums_ptr is not None:
            sums += fold(grad, SUM_ROWS)
    if band_sums_ptr is not None:
        tl.store(band_sums_ptr + band * cols + col, tl.sum(sums, axis=0), col_mask)


def forward_launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, out: Tensor, p: float
) -> None:
    rows, cols = x.shape
    tile = find("dropout_forward", x.dtype, cols)
    with on_device_of(x):
        _forward_kernel[(cdiv(rows, tile.rows) * cdiv(cols, tile.cols),)](
            *(x, bias, residual, seed, out, threshold(p), 1 / (1 - p), rows, cols),
            *(tile.rows, tile.cols),
            **tile.options,
        )


def backward_launch(dy: Tensor, seed: Tensor, dx: Tensor, dbias: Tensor | None, p: float) -> None:
    rows, cols = dy.shape
    tile = find("dropout_backward" if dbias is None else "dropout_backward, sum", dy.dtype, cols)
    bands = cdiv(rows, tile.rows * tile.steps)
    band_sums = None if dbias is None else dbias.new_empty(bands, cols)
    with on_device_of(dy):
        _backward_kernel[(bands * cdiv(cols, tile.cols),)](
            *(dy, seed, dx, band_sums, threshold(p), 1 / (1 - p), rows, cols),
            *(tile.rows, tile.cols, tile.stages, tile.steps, rows_at_once(tile, vector_of(dy))),
            **tile.options,
        )
    if band_sums is not None and dbias is not None:
        sum_bands(band_sums, dbias)


_dropout_forward = operator(
    "dropout_forward_(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, Tensor(a!) out, float p) -> ()",
    reference=forward_reference,
    launch=forward_launch,
)
_dropout_backward = operator(
    "dropout_backward_(Tensor dy, Tensor seed, Tensor(a!) dx, Tensor(b!)? dbias, float p) -> ()",
    reference=backward_reference,
    launch=backward_launch,
)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from the device's default generator, int64 [], which the host never reads.

    So torch.manual_seed, tools that save and restore generators (such as torch.utils.checkpoint) and CUDA
    graphs work as for torch's own dropout.  It takes one launch of 8 bytes.
    """
    return torch.empty((), dtype=torch.int64, device=device).random_()


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor | None
) -> Tensor:
    """Compute residual + dropout(x + bias), [rows, cols] in x's dtype.

    Args:
        x: [rows, cols], FP32, FP16 or bf16, contiguous.
        bias: [cols] in x's dtype, or None.
        residual: [rows, cols] in x's dtype, or None; its gradient is dy.
        p: probability of dropping an element, 0 <= p < 1.
        seed: int64 [] on x's device, from `draw_seed`; None if p is 0.

    Raises:
        ValueError: if shapes, dtypes, devices or p do not fit.
    """
    check_input("x", x)
    check_like("bias", bias, x, (x.shape[1],), x.dtype)
    check_like("residual", residual, x, (x.shape[0], x.shape[1]), x.dtype)
    _check(x, p, seed)
    out = torch.empty_like(x)
    _dropout_forward(x, bias, residual, seed, out, p)
    return out


def dropout_backward(dy: Tensor, p: float, seed: Tensor, *, column_sum: bool = False) -> DropoutBackward:
    """Compute the gradients of `dropout_forward` with the same p and seed.

    Args:
        dy: [rows, cols], FP32, FP16 or bf16, contiguous.
        p: probability of dropping an element, as in the forward.
        seed: the forward's seed.
        column_sum: whether to return the gradient of the bias, FP32 and deterministic.

    Raises:
        ValueError: if shapes, dtypes, devices or p do not fit.
    """
    check_input("dy", dy)
    _check(dy, p, seed)
    dx = torch.empty_like(dy)
    dbias = dy.new_empty(dy.shape[1], dtype=torch.float32) if column_sum else None
    _dropout_backward(dy, seed, dx, dbias, p)
    return DropoutBackward(dx, dbias)


def _check(x: Tensor, p: float, seed: Tensor | None) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; dropout needs 0 <= p < 1")
    if seed is None:
        if p:
            raise ValueError(f"p is {p} and there is no seed; draw one by draw_seed")
    elif seed.shape or seed.dtype != torch.int64 or seed.device != x.device:
        raise ValueError(
            f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}; dropout needs torch.int64 () on "
            f"{x.device}"
        )
