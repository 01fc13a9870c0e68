"""Delayed scaling: one launch rolls the amax histories of a whole model and sets its scales.

For each of n tensors, with a history of L rows whose row 0 collects the running amax:

    a = history[0];  if a != 0: roll rows up by one, history[L-1] = a, history[0] = 0
    amax = max over all L values before the roll ("max"), or a ("most_recent")
    scale = (fp8_max / amax) / 2^margin, floored to a power of two if asked

An amax of 0, infinity or NaN keeps the old scale; a scale that overflows becomes the largest FP32 number.  A
tensor with a == 0 was not cast since the last update: its history does not roll.  As Transformer Engine since
0.13 (its CUDA kernel, not its Python fallback).

Bytes: 8 L n + 8 n, a few hundred kilobytes for a large model; launch-bound.
"""

from __future__ import annotations

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._triton import cdiv, jit, on_device_of, tl
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
BLOCK = 128


def reference(
    scale: Tensor, history: Tensor, fp8_max: Tensor, most_recent: bool, margin: float, power_of_two: bool
) -> None:
    latest = history[0].clone()
    # torch.amax keeps NaN, as the kernel does.
    amax = latest if most_recent else history.amax(0)
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], latest[None]])[: history.shape[0]]
    history.copy_(torch.where(latest != 0, rolled, history))
    candidate = fp8_max / amax * 2.0**-margin
    candidate = torch.where(candidate.isinf(), FLT_MAX, candidate)
    if power_of_two:
        mantissa, exponent = torch.frexp(candidate)
        candidate = torch.ldexp(torch.where(mantissa > 0, 0.5, mantissa), exponent)
    scale.copy_(torch.where((amax > 0) & amax.isfinite(), candidate, scale))


@jit
def _update_kernel(
    scale_ptr,
    history_ptr,
    fp8_max_ptr,
    n,
    inverse_margin,
    LENGTH: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FLT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    latest = tl.load(history_ptr + index, mask, 0.0)
    rolls = mask & (latest != 0)
    amax = latest
    for row in range(1, LENGTH):
        value = tl.load(history_ptr + row * n + index, mask, 0.0)
        if not MOST_RECENT:
            amax = tl.maximum(amax, value, propagate_nan=tl.PropagateNan.ALL)
        if row > 1:
            tl.store(history_ptr + (row - 1) * n + index, value, rolls)
    if LENGTH > 1:
        tl.store(history_ptr + (LENGTH - 1) * n + index, latest, rolls)
    tl.store(history_ptr + index, 0.0, rolls)
    candidate = tl.load(fp8_max_ptr + index, mask, 1.0) / amax * inverse_margin
    candidate = tl.minimum(candidate, FLT_MAX)
    if POWER_OF_TWO:
        # Without the mantissa: the largest power of two below.
        candidate = (candidate.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    is_usable = (amax > 0) & (amax < float("inf"))
    tl.store(scale_ptr + index, candidate, mask & is_usable)


def launch(
    scale: Tensor, history: Tensor, fp8_max: Tensor, most_recent: bool, margin: float, power_of_two: bool
) -> None:
    length, n = history.shape
    with on_device_of(scale):
        _update_kernel[(cdiv(n, BLOCK),)](
            scale, history, fp8_max, n, 2.0**-margin, length, most_recent, power_of_two, FLT_MAX, BLOCK
        )


_update_scales = operator(
    "update_scales_(Tensor(a!) scale, Tensor(b!) history, Tensor fp8_max, bool most_recent, float margin, "
    "bool power_of_two) -> ()",
    reference=reference,
    launch=launch,
)


def update_scales(
    scale: Tensor,
    history: Tensor,
    fp8_max: Tensor,
    *,
    most_recent: bool = False,
    margin: float = 0.0,
    power_of_two: bool = True,
) -> None:
    """Updates scales and histories of n tensors in place.

    Args:
        scale: FP32 [n].
        history: FP32 [L, n]; row 0 holds the amax since the last update.
        fp8_max: FP32 [n]: 448 for E4M3, 57344 for E5M2.
        margin: scales are divided by 2^margin.

    Raises:
        ValueError: if shapes do not fit, or a tensor is not FP32 and contiguous.
    """
    n = scale.numel()
    for name, tensor, shape in (
        ("scale", scale, (n,)),
        ("history", history, (history.shape[0], n)),
        ("fp8_max", fp8_max, (n,)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; update_scales needs it contiguous, in FP32 "
                f"and of shape {shape}"
            )
    _update_scales(scale, history, fp8_max, most_recent, margin, power_of_two)
