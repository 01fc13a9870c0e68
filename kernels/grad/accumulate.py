"""Addition of one microbatch's gradient to an accumulator, usually FP32, in plain PyTorch.

    target  = grad                    the first time  (nothing is zeroed beforehand, and -0.0 stays -0.0)
    target += grad                    later           (summed in the wider dtype, at least FP32)

Either is rounded once to the target's dtype, which may be narrower than the gradient's.

Bytes per element, grad of p bytes and target of a bytes: a + p the first time, 2 a + p later; both are one
pass of an element-wise kernel and run at copy bandwidth, so PyTorch's own are used on CPU and CUDA alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

TARGET_DTYPES = (torch.float32, torch.bfloat16)
"""What weight gradients are written to: FP32 sums over microbatches, or one microbatch's gradient in bf16."""


def accumulate(target: Tensor, grad: Tensor, *, first: bool) -> None:
    """Write (`first`) or add `grad` to `target` in place, of the same shape; rounds once."""
    if first:
        target.copy_(grad)
    else:
        target.add_(grad)


def bytes_moved(target: Tensor, grad: Tensor, *, first: bool) -> int:
    """Bytes read and written by `accumulate` with the same arguments."""
    passes_over_target = 1 if first else 2
    return target.numel() * (passes_over_target * target.element_size() + grad.element_size())
