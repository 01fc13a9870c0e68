"""Tensors and loads that the kernels of a norm's forward share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flatfsdp.kernels.shared.pairs import to_fp32
from flatfsdp.kernels.shared.triton import jit, tl


class NormTensors(NamedTuple):
    """Tensors of a norm's forward, in the order in which its kernels take them, as `x_ptr` and so on."""

    x: Tensor
    """Input [rows, cols], FP32, fp16 or bf16."""
    residual: Tensor | None
    """[rows, cols] in x's dtype, added to x before."""
    weight: Tensor
    """[cols], FP32, fp16 or bf16."""
    bias: Tensor | None
    """[cols], FP32, fp16 or bf16."""
    summed: Tensor | None
    """Output: x + residual in x's dtype; None without a residual."""
    mean: Tensor | None
    """Output: mean of each row [rows], FP32; None for RMSNorm, which subtracts none."""
    rstd: Tensor
    """Output: reciprocal standard deviation of each row [rows], FP32."""
    out: Tensor | None
    """Output: y [rows, cols] in x's dtype; None: not written, like the next two."""
    rowwise: Tensor | None
    """Output: y scaled [rows, cols], FP8."""
    columnwise: Tensor | None
    """Output: its transpose [cols, rows], FP8."""
    scale: Tensor | None
    """Scale of the FP8 outputs, one FP32 number."""
    amax: Tensor | None
    """Raised to max |y|, one FP32 number."""


@jit
def load_fp32(pointers, mask, POLICY: tl.constexpr):
    """Load numbers of any dtype as FP32; 0 where masked, if there is a mask.

    POLICY says how the cache treats them ("": as usual).
    """
    if mask is None:
        value = tl.load(pointers, eviction_policy=POLICY)
    else:
        value = tl.load(pointers, mask, 0.0, eviction_policy=POLICY)
    return to_fp32(value)


@jit
def load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, POLICY: tl.constexpr):
    """Load x, or x + residual, which is rounded to x's dtype and stored; as FP32."""
    x = load_fp32(x_ptr + index, mask, POLICY)
    if residual_ptr is not None:
        total = (x + load_fp32(residual_ptr + index, mask, POLICY)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + index, total, mask)
        x = to_fp32(total)
    return x


@jit
def load_gain(weight_ptr, col, mask, ZERO_CENTERED: tl.constexpr):
    """Load the weight, or 1 + weight if it is zero-centered, as FP32."""
    weight = load_fp32(weight_ptr + col, mask, "evict_last")
    if ZERO_CENTERED:
        weight += 1.0
    return weight
