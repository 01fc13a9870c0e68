"""Counts of amaxes that do not fit their scale, for a whole model in one launch.

For each of n tensors, with an amax and the scale that its cast used, 1 is added to each row that applies:

    row 0   the amax is not 0: something was cast
    row 1   scale > fp8_max / amax: the cast has saturated, as it does with an infinite amax
    row 2   the amax is infinite
    row 3   the amax is NaN, which rows 1 and 2 do not count

A scale computed from the same amax, or from a larger one, is never too large: both are the same division,
rounded alike.

Bytes: 76 n, launch-bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import magnitude_bits
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

ROWS = 4
INFINITY = 0x7F800000
"""Bits of an infinite FP32 number; those of NaN are larger."""
BLOCK = 128
"""Number of tensors of one program."""


def count_reference(amax: Tensor, scale: Tensor, fp8_max: Tensor, counts: Tensor) -> None:
    counts += torch.stack([amax != 0, scale > fp8_max / amax, amax == math.inf, amax.isnan()])


@jit
def _count_kernel(
    amax_ptr,  # amax of each tensor [n], FP32, not negative
    scale_ptr,  # scale that its cast has used [n], FP32
    fp8_max_ptr,  # largest number of its FP8 format [n], FP32
    counts_ptr,  # what is added to [4, n], int64
    n,  # number of tensors
    INFINITY: tl.constexpr,  # bits of an infinite FP32 number
    BLOCK: tl.constexpr,  # tensors of one program
):
    """Add to the counts of some tensors."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    amax = tl.load(amax_ptr + index, mask, 0.0)
    scale = tl.load(scale_ptr + index, mask, 0.0)
    fp8_max = tl.load(fp8_max_ptr + index, mask, 1.0)
    bits = magnitude_bits(amax)
    at = counts_ptr + index
    # Triton's `/` is not IEEE division on a GPU.
    _add(at, mask, bits != 0)
    _add(at + n, mask, scale > tl.div_rn(fp8_max, amax))
    _add(at + 2 * n, mask, bits == INFINITY)
    _add(at + 3 * n, mask, bits > INFINITY)


@jit
def _add(counts_ptr, mask, applies):
    """Add 1 to the counts of the tensors selected by `applies`."""
    tl.store(counts_ptr, tl.load(counts_ptr, mask, 0) + applies.to(tl.int64), mask)


@for_each_shape
def _prepared_count(n: int) -> PreparedKernel:
    return PreparedKernel(_count_kernel, (cdiv(n, BLOCK),), n, INFINITY, BLOCK)


def count_launch(amax: Tensor, scale: Tensor, fp8_max: Tensor, counts: Tensor) -> None:
    _prepared_count(amax.numel())(amax, scale, fp8_max, counts)


_count_overflows = operator(
    "count_overflows_(Tensor amax, Tensor scale, Tensor fp8_max, Tensor(a!) counts) -> ()",
    reference=count_reference,
    launch=count_launch,
)


def count_overflows(amax: Tensor, scale: Tensor, fp8_max: Tensor, counts: Tensor) -> None:
    """Add to the counts of n tensors, in place, without a synchronisation.

    Args:
        amax: FP32 [n], not negative.
        scale: FP32 [n], the scales of the casts that recorded the amaxes.
        fp8_max: FP32 [n]: 448 for E4M3, 57344 for E5M2.
        counts: int64 [4, n], incremented; the module's docstring lists its rows.

    Raises:
        ValueError: if a shape or dtype does not fit, or a tensor is not contiguous.
    """
    n = amax.numel()
    for name, tensor, dtype, shape in (
        ("amax", amax, torch.float32, (n,)),
        ("scale", scale, torch.float32, (n,)),
        ("fp8_max", fp8_max, torch.float32, (n,)),
        ("counts", counts, torch.int64, (ROWS, n)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; count_overflows needs it contiguous, in "
                f"{dtype} and of shape {shape}"
            )
    _count_overflows(amax, scale, fp8_max, counts)
