"""Addition of one microbatch's gradient to the FP32 accumulator, in plain PyTorch.

    target  = widen(grad)             the first time  (nothing is zeroed beforehand, and -0.0 stays -0.0)
    target += widen(grad)             later           (one rounding, in the target's dtype)

Bytes per element, grad of p bytes and target of a bytes: a + p the first time, 2 a + p later; both are one
pass of an element-wise kernel and run at copy bandwidth, so PyTorch's own are used on CPU and CUDA alike.
"""

from __future__ import annotations

from torch import Tensor


def accumulate(target: Tensor, grad: Tensor, *, first: bool) -> None:
    """Write (`first`) or add `grad` to `target` in place; same shape, target's dtype at least as wide."""
    if first:
        target.copy_(grad)
    else:
        target.add_(grad)


def bytes_moved(target: Tensor, grad: Tensor, *, first: bool) -> int:
    """Bytes read and written by `accumulate` with the same arguments."""
    passes_over_target = 1 if first else 2
    return target.numel() * (passes_over_target * target.element_size() + grad.element_size())
