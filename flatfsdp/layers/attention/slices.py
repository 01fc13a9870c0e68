"""Additions to slices of a joint projection, such as what LoRA's adapters of query and value give.

In:   a joint projection that nothing has read yet, and additions to some of its columns.
Out:  the same memory.
Next: `qkv.py` splits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfsdp.torch_private import once_differentiable


def add_to_slices(mixed: Tensor, deltas: Sequence[tuple[int, Tensor]]) -> Tensor:
    """`mixed`, to whose columns deltas have been added in place; gradients of deltas are views of its own.

    Args:
        mixed: [..., columns], not used any more: what is returned has its memory.
        deltas: (start, delta [..., n]) each, which is added to the columns [start, start + n).

    Raises:
        ValueError: if a delta reaches over the columns, or the other dimensions differ.
    """
    for start, delta in deltas:
        columns = mixed.shape[-1]
        if delta.shape[:-1] != mixed.shape[:-1] or not 0 <= start <= columns - delta.shape[-1]:
            raise ValueError(
                f"a delta of shape {tuple(delta.shape)} from column {start} on does not fit into a joint "
                f"projection of shape {tuple(mixed.shape)}"
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
        # As a new tensor over the same memory: were `mixed`, which may be a view, marked as changed, autograd
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
