"""FP8 scales from amaxes: for a whole model at once in delayed scaling, for one tensor in current scaling.

Delayed: for each of n tensors, with a history of L rows whose row 0 collects the running amax:

    a = history[0];  if a != 0: roll rows up by one, history[L-1] = a, history[0] = 0
    amax = max over all L values before the roll ("max"), or a ("most_recent")
    scale = (fp8_max / amax) / 2^margin, floored to a power of two if asked

An amax of 0, infinity or NaN keeps the old scale; a scale that overflows becomes the largest FP32 number.  A
tensor with a == 0 was not cast since the last update: neither its history nor its scale changes.  This
follows Transformer Engine since 0.13 (its CUDA kernel, not its Python fallback), which may rescale such a
tensor.

Current: the same with the amax of the tensor itself, at least `epsilon`, and 1 instead of the old scale.

Scales and their inverses are written to new tensors, so that tensors cast with the old ones stay readable.

Bytes: 8 L n + 16 n, a few hundred kilobytes for a large model; launch-bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import magnitude_bits
from flatfsdp.kernels.shared.tiles import Tile, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

FLT_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000
"""Mask of an FP32 number's exponent; the masked number is the largest power of two not above it."""
BLOCK = 128
"""Number of tensors of one program in current scaling."""


class Scales(NamedTuple):
    """Scales of n tensors, FP32 [n], and `scale_inv`, 1 / scale."""

    scale: Tensor
    scale_inv: Tensor


def update_tile(length: int) -> Tile:
    """A tile of whole histories: 32 numbers per thread, and at least one 32-byte sector of each row."""
    rows = power_of_two(length)
    return Tile(rows, max(8, min(128, 8192 // rows)), 8)


def _write_scales(
    amax: Tensor,
    fp8_max: Tensor,
    factor: float,
    power_of_two: bool,
    otherwise: Tensor | float,
    scale: Tensor,
    scale_inv: Tensor,
) -> None:
    """Write scales and inverses in plain PyTorch; `otherwise` is the scale for unusable amaxes."""
    candidate = fp8_max / amax * factor
    candidate = torch.where(candidate.isinf(), FLT_MAX, candidate)
    if power_of_two:
        candidate = (candidate.view(torch.int32) & EXPONENT).view(torch.float32)
    scale.copy_(torch.where((amax > 0) & amax.isfinite(), candidate, otherwise))
    scale_inv.copy_(1 / scale)


def update_reference(
    history: Tensor,
    old_scale: Tensor,
    fp8_max: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    most_recent: bool,
    margin: float,
    power_of_two: bool,
) -> None:
    latest = history[0].clone()
    # torch.amax keeps NaN, as the kernel does.
    amax = latest if most_recent else history.amax(0)
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], latest[None]])[: history.shape[0]]
    history.copy_(torch.where(latest != 0, rolled, history))
    amax = torch.where(latest != 0, amax, 0.0)
    _write_scales(amax, fp8_max, 2.0**-margin, power_of_two, old_scale, scale, scale_inv)


def current_reference(
    amax: Tensor, fp8_max: Tensor, scale: Tensor, scale_inv: Tensor, epsilon: float, power_of_two: bool
) -> None:
    # torch.clamp keeps NaN, as the kernel does.
    _write_scales(amax.clamp(min=epsilon), fp8_max, 1.0, power_of_two, 1.0, scale, scale_inv)


@jit
def _store_scales(
    amax,  # amaxes of a block of tensors, FP32
    fp8_max,  # largest number of each tensor's FP8 format, FP32
    factor,  # what all scales are multiplied by
    otherwise,  # scale where the amax is 0, infinity or NaN
    scale_ptr,  # pointers to each tensor's scale, FP32
    scale_inv_ptr,  # pointers to its inverse, FP32
    mask,  # tensors of the block that exist
    POWER_OF_TWO: tl.constexpr,  # floor scales to powers of two
    FLT_MAX: tl.constexpr,  # largest FP32 number
    EXPONENT: tl.constexpr,  # mask of an FP32 number's exponent
):
    """Store the scales that amaxes give, and their inverses."""
    # Triton's `/` is not IEEE division on a GPU.
    candidate = tl.minimum(tl.div_rn(fp8_max, amax) * factor, FLT_MAX)
    if POWER_OF_TWO:
        candidate = (candidate.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    is_usable = (amax > 0) & (amax < float("inf"))
    scale = tl.where(is_usable, candidate, otherwise)
    tl.store(scale_ptr, scale, mask)
    tl.store(scale_inv_ptr, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), mask)


@jit
def _update_kernel(
    history_ptr,  # amaxes [LENGTH, n], FP32, rolled in place; row 0 is the running amax
    old_scale_ptr,  # scales until now [n], FP32
    fp8_max_ptr,  # largest number of each tensor's FP8 format [n], FP32
    scale_ptr,  # next scales [n], FP32
    scale_inv_ptr,  # their inverses [n], FP32
    n,  # number of tensors
    inverse_margin,  # 2^-margin, which scales are multiplied by
    LENGTH: tl.constexpr,  # rows of the history
    MOST_RECENT: tl.constexpr,  # take the running amax in place of the largest in the history
    POWER_OF_TWO: tl.constexpr,  # floor scales to powers of two
    FLT_MAX: tl.constexpr,  # largest FP32 number
    EXPONENT: tl.constexpr,  # mask of an FP32 number's exponent
    BLOCK_ROWS: tl.constexpr,  # LENGTH, rounded up to a power of two
    BLOCK_COLS: tl.constexpr,  # tensors of one program
):
    """Roll the histories of some tensors and store their next scales."""
    index = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < n
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    at = history_ptr + row * n + index[None, :]
    history = tl.load(at, (row < LENGTH) & mask[None, :], 0.0)
    latest = tl.load(history_ptr + index, mask, 0.0)
    amax = latest
    if not MOST_RECENT:
        amax = tl.max(magnitude_bits(history), axis=0).to(tl.float32, bitcast=True)
    amax = tl.where(latest != 0, amax, 0.0)
    tl.debug_barrier()  # rows are written that other threads have read
    rolls = mask & (latest != 0)
    tl.store(at - n, history, (row > 1) & (row < LENGTH) & rolls[None, :])
    if LENGTH > 1:
        tl.store(history_ptr + (LENGTH - 1) * n + index, latest, rolls)
    tl.store(history_ptr + index, 0.0, rolls)
    fp8_max = tl.load(fp8_max_ptr + index, mask, 1.0)
    old_scale = tl.load(old_scale_ptr + index, mask, 1.0)
    _store_scales(
        *(amax, fp8_max, inverse_margin, old_scale, scale_ptr + index, scale_inv_ptr + index, mask),
        *(POWER_OF_TWO, FLT_MAX, EXPONENT),
    )


@jit
def _current_kernel(
    amax_ptr,  # amax of each tensor [n], FP32
    fp8_max_ptr,  # largest number of each tensor's FP8 format [n], FP32
    scale_ptr,  # scales [n], FP32
    scale_inv_ptr,  # their inverses [n], FP32
    n,  # number of tensors
    epsilon,  # least amax
    POWER_OF_TWO: tl.constexpr,  # floor scales to powers of two
    FLT_MAX: tl.constexpr,  # largest FP32 number
    EXPONENT: tl.constexpr,  # mask of an FP32 number's exponent
    BLOCK: tl.constexpr,  # tensors of one program
):
    """Store the scales of some tensors."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    amax = tl.load(amax_ptr + index, mask, 1.0)
    amax = tl.maximum(amax, epsilon, propagate_nan=tl.PropagateNan.ALL)
    fp8_max = tl.load(fp8_max_ptr + index, mask, 1.0)
    _store_scales(
        *(amax, fp8_max, 1.0, 1.0, scale_ptr + index, scale_inv_ptr + index, mask),
        *(POWER_OF_TWO, FLT_MAX, EXPONENT),
    )


def update_launch(
    history: Tensor,
    old_scale: Tensor,
    fp8_max: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    most_recent: bool,
    margin: float,
    power_of_two: bool,
) -> None:
    start = _prepared_update(*history.shape, most_recent, margin, power_of_two)
    start(history, old_scale, fp8_max, scale, scale_inv)


@for_each_shape
def _prepared_update(
    length: int, n: int, most_recent: bool, margin: float, power_of_two: bool
) -> PreparedKernel:
    tile = update_tile(length)
    return PreparedKernel(
        _update_kernel,
        (cdiv(n, tile.cols),),
        *(n, 2.0**-margin, length, most_recent, power_of_two, FLT_MAX, EXPONENT, tile.rows, tile.cols),
        num_warps=tile.warps,
    )


def current_launch(
    amax: Tensor, fp8_max: Tensor, scale: Tensor, scale_inv: Tensor, epsilon: float, power_of_two: bool
) -> None:
    _prepared_current(amax.numel(), epsilon, power_of_two)(amax, fp8_max, scale, scale_inv)


@for_each_shape
def _prepared_current(n: int, epsilon: float, power_of_two: bool) -> PreparedKernel:
    return PreparedKernel(
        _current_kernel, (cdiv(n, BLOCK),), n, epsilon, power_of_two, FLT_MAX, EXPONENT, BLOCK
    )


_update_scales = operator(
    "update_scales_(Tensor(a!) history, Tensor old_scale, Tensor fp8_max, Tensor(b!) scale, "
    "Tensor(c!) scale_inv, bool most_recent, float margin, bool power_of_two) -> ()",
    reference=update_reference,
    launch=update_launch,
)
_current_scales = operator(
    "current_scales_(Tensor amax, Tensor fp8_max, Tensor(a!) scale, Tensor(b!) scale_inv, float epsilon, "
    "bool power_of_two) -> ()",
    reference=current_reference,
    launch=current_launch,
)


def update_scales(
    history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    *,
    most_recent: bool = False,
    margin: float = 0.0,
    power_of_two: bool = True,
) -> Scales:
    """Roll the histories of n tensors, in place, and return their next scales.

    Args:
        history: FP32 [L, n]; row 0 holds the amax since the last update.
        scale: FP32 [n], the scales until now; not written.
        fp8_max: FP32 [n]: 448 for E4M3, 57344 for E5M2.
        most_recent: take the latest amax instead of the history's largest.
        margin: scales are divided by 2^margin.
        power_of_two: floor scales to powers of two.

    Raises:
        ValueError: if shapes do not fit, or a tensor is not FP32 and contiguous.
    """
    n = scale.numel()
    _check("update_scales", "scale", scale, (n,))
    _check("update_scales", "history", history, (history.shape[0], n))
    _check("update_scales", "fp8_max", fp8_max, (n,))
    result = Scales(torch.empty_like(scale), torch.empty_like(scale))
    _update_scales(history, scale, fp8_max, *result, most_recent, margin, power_of_two)
    return result


def current_scales(
    amax: Tensor, fp8_max: Tensor, *, epsilon: float = 0.0, power_of_two: bool = True
) -> Scales:
    """Scales of n tensors from their own amaxes: fp8_max / max(amax, epsilon), or 1 if that is not usable.

    Args:
        amax: FP32 [n], not negative.
        fp8_max: FP32 [n]: 448 for E4M3, 57344 for E5M2.
        epsilon: smallest amax, to which smaller ones are raised; if it then is 0, infinity or NaN, the scale
            is 1.
        power_of_two: floor scales to powers of two.

    Raises:
        ValueError: if shapes do not fit, or a tensor is not FP32 and contiguous.
    """
    n = amax.numel()
    _check("current_scales", "amax", amax, (n,))
    _check("current_scales", "fp8_max", fp8_max, (n,))
    result = Scales(torch.empty_like(amax), torch.empty_like(amax))
    _current_scales(amax, fp8_max, *result, epsilon, power_of_two)
    return result


def align_inverses(scales: Scales) -> Scales:
    """Copy inverses to multiples of 16 bytes, as cuBLASLt requires; the scales are unchanged."""
    inverses = scales.scale_inv.new_empty(scales.scale_inv.numel(), 4)[:, 0]
    return Scales(scales.scale, inverses.copy_(scales.scale_inv))


def one_by_one(scales: Scales) -> tuple[Scales, ...]:
    """Split scales into one pair per tensor, FP32 [1], in one call.

    Slicing n times takes ten times as long on the host.  The results must not be written to: autograd does
    not know that they are views, which makes the split cheaper still.
    """
    ones = [1] * scales.scale.numel()
    scale, scale_inv = (each.unsafe_split_with_sizes(ones) for each in scales)
    return tuple(map(Scales._make, zip(scale, scale_inv, strict=True)))


def _check(function: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; {function} needs it contiguous, in FP32 and of "
            f"shape {shape}"
        )
