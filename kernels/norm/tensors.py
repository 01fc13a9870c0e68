"""What the kernels of a norm share: their tensors, and loads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flatfsdp.kernels.shared.pairs import widened
from flatfsdp.kernels.shared.triton import jit, tl


class NormTensors(NamedTuple):
    """Of a norm's forward, in the order in which its kernels take them; `norm_forward` says what they are."""

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
def load_wide(pointers, mask, POLICY: tl.constexpr):
    """FP32, and 0 where masked."""
    if mask is None:
        value = tl.load(pointers, eviction_policy=POLICY)
    else:
        value = tl.load(pointers, mask, 0.0, eviction_policy=POLICY)
    return widened(value)


@jit
def load_summed(x_ptr, residual_ptr, summed_ptr, index, mask, POLICY: tl.constexpr):
    """x, or x + residual rounded to x's dtype and stored; as FP32."""
    x = load_wide(x_ptr + index, mask, POLICY)
    if residual_ptr is not None:
        total = (x + load_wide(residual_ptr + index, mask, POLICY)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + index, total, mask)
        x = widened(total)
    return x


@jit
def load_gain(weight_ptr, col, mask, ZERO_CENTERED: tl.constexpr):
    weight = load_wide(weight_ptr + col, mask, "evict_last")
    if ZERO_CENTERED:
        weight += 1.0
    return weight
