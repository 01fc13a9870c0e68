"""In-place additions to slices of a packed projection, such as LoRA's deltas of query and value.

In:   a packed projection that nothing has read yet, and deltas for some of its columns.
Out:  a tensor in the same memory.
Next: `qkv.py` splits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfsdp.torch_private import once_differentiable


def add_to_slices(mixed: Tensor, deltas: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Adds each delta to its columns of `mixed` in place; the deltas' gradients are views of the result's.

    Args:
        mixed: [..., columns]; do not use it afterwards, its memory belongs to the result.
        deltas: (start, delta [..., n]) pairs; each is added to columns [start, start + n).

    Raises:
        ValueError: if a delta exceeds the columns, or other dimensions differ.
    """
    for start, delta in deltas:
        columns = mixed.shape[-1]
        if delta.shape[:-1] != mixed.shape[:-1] or not 0 <= start <= columns - delta.shape[-1]:
            raise ValueError(
                f"a delta {tuple(delta.shape)} from column {start} on does not fit into {tuple(mixed.shape)}"
            )
    if not deltas:
        return mixed
    starts, tensors = zip(*deltas, strict=True)
    out: Tensor = _AddToSlices.apply(mixed, starts, *tensors)
    return out


class _AddToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, starts: tuple[int, ...], *deltas: Tensor) -> Tensor:
        ctx.slices = [(start, delta.shape[-1]) for start, delta in zip(starts, deltas, strict=True)]
        # A new tensor over the same memory: if `mixed`, which may be a view, were marked as changed, autograd
        # would copy its gradient.
        out = mixed.detach()
        for (start, width), delta in zip(ctx.slices, deltas, strict=True):
            out.narrow(-1, start, width).add_(delta)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        grads = (
            dy.narrow(-1, start, width) if is_needed else None
            for (start, width), is_needed in zip(ctx.slices, needed, strict=True)
        )
        return dy, None, *grads
