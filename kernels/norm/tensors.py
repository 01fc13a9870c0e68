"""Tensors and loads shared by the kernels of a norm's forward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flatfsdp.kernels.shared.pairs import to_fp32
from flatfsdp.kernels.shared.triton import jit, tl


class NormTensors(NamedTuple):
    """Tensors of a norm's forward, in the argument order of the kernels in `rows.py` and `wide.py`."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    summed: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    out: Tensor | None
    rowwise: Tensor | None
    columnwise: Tensor | None
    scale: Tensor | None
    amax: Tensor | None


@jit
def load_fp32(pointers, mask, POLICY: tl.constexpr):
    """Load numbers of any dtype as FP32; 0 where masked, if there is a mask.

    POLICY is the eviction policy of the cache ("": the default).
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
