"""Splits a packed projection into query, key and value, and joins their gradients in backward.

    interleaved        each group of heads has its queries, its key and its value:  [q.. k v] [q.. k v] ...
    not interleaved    all queries, then all keys, then all values:                 [Q; K; V]

Next: `multihead.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.attention.join import join_heads
from flatfsdp.kernels.attention.rope import rope
from flatfsdp.layers.attention.rotary import RotaryTables, apply_rotary
from flatfsdp.torch_private import Function, once_differentiable


class QKV(NamedTuple):
    """Inputs of attention: query [.., .., heads, head_dim]; key, value [.., .., groups, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


class HeadsOf(NamedTuple):
    """The layout of a packed projection.

    Attributes:
        heads: number of query heads.
        groups: heads of key and value; a divisor of `heads`.
        head_dim: elements of a head.
        interleaved: whether each group of heads is stored as its queries, its key, its value.
    """

    heads: int
    groups: int
    head_dim: int
    interleaved: bool


def heads_of_projection(
    mixed: Tensor,
    of: HeadsOf,
    tables: RotaryTables | tuple[Tensor, Tensor] | None,
    *,
    batch_first: bool,
    neighbours: bool = False,
    q_norm: Callable[[Tensor], Tensor] | None = None,
    k_norm: Callable[[Tensor], Tensor] | None = None,
    norm_first: bool = True,
) -> QKV:
    """Splits a packed projection into query, key and value, normalized and rotated.

    Args:
        mixed: [seq, batch, (heads + 2 groups) * head_dim], or [batch, seq, ..] if `batch_first`.
        of: the layout of `mixed`.
        tables: cosines and sines, FP32 [at least seq, n]; None: no RoPE.
        batch_first: whether the batch is the first dimension.
        neighbours: RoPE rotates pairs of neighbouring elements instead of pairs from the two halves.
        q_norm: norm of queries over the elements of each head; given together with `k_norm`, or not at all.
        k_norm: the same for keys.
        norm_first: normalize before RoPE instead of after it.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    rotates_last = norm_first and q_norm is not None
    query, key, value = split = split_qkv(
        mixed, of, None if rotates_last else tables, batch_first=batch_first, neighbours=neighbours
    )
    if q_norm is None or k_norm is None:
        return split
    query, key = q_norm(query), k_norm(key)
    if rotates_last and tables is not None:
        cos, sin = tables[:2]
        query, key = (
            apply_rotary(x, cos, sin, batch_first=batch_first, interleaved=neighbours) for x in (query, key)
        )
    if torch.is_grad_enabled():
        # Attention saves the value for backward: a view would keep the whole packed projection alive.
        value = value.contiguous()
    return QKV(query, key, value)


def split_qkv(
    mixed: Tensor,
    of: HeadsOf,
    tables: RotaryTables | tuple[Tensor, Tensor] | None = None,
    *,
    batch_first: bool = False,
    neighbours: bool = False,
) -> QKV:
    """Splits `mixed` into query, key and value, and rotates the first two, in one autograd node.

    Without tables they are views; backward joins the three gradients in one pass.  With interleaved heads and
    1 < groups < heads the queries are a copy, because no strides describe them.  With tables the values are a
    copy, too, if `mixed` needs a gradient.

    Args:
        mixed: [seq, batch, (heads + 2 groups) * head_dim], or batch first.
        of: the layout of `mixed`.
        tables: cosines and sines, FP32 [at least seq, n], contiguous; the first 2 n elements of each head are
            rotated.  None: no RoPE.
        batch_first: whether the batch is the first dimension.
        neighbours: RoPE rotates pairs of neighbouring elements instead of pairs from the two halves.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    heads, groups, head_dim, _ = of
    if mixed.shape[-1] != (heads + 2 * groups) * head_dim:
        raise ValueError(f"{heads} + 2 x {groups} heads of {head_dim} do not fill {mixed.shape[-1]} columns")
    cos, sin = (None, None) if tables is None else tables[:2]
    return QKV(*_Split.run(mixed, cos, sin, of, batch_first, neighbours))


class _Split(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        of: HeadsOf,
        batch_first: bool,
        neighbours: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.of = of
        ctx.way = way = {"batch_first": batch_first, "interleaved": neighbours}
        ctx.save_for_backward(cos, sin)
        query, key, value = _heads(mixed, of)
        if cos is None or sin is None:
            return query, key, value
        query, key = rope(query, cos, sin, **way), rope(key, cos, sin, **way)
        # Attention saves the value for backward: a view would keep the whole packed projection alive.
        return query, key, value.contiguous() if ctx.needs_input_grad[0] else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The gradient of a sum is expanded, with strides of 0, which the kernel cannot read.
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        of: HeadsOf = ctx.of
        if cos is not None and of.interleaved:
            query, key = (rope(x, cos, sin, **ctx.way, inverse=True) for x in (query, key))
        pack = join_heads(query, key, value, interleaved=of.interleaved)
        if cos is not None and not of.interleaved:
            # Queries and keys are adjacent: one launch for both.
            heads = pack.view(*pack.shape[:2], of.heads + 2 * of.groups, of.head_dim)
            turned = heads.narrow(2, 0, of.heads + of.groups)
            rope(turned, cos, sin, **ctx.way, inverse=True, in_place=True)
        return pack, None, None, None, None, None


def _heads(mixed: Tensor, of: HeadsOf) -> Sequence[Tensor]:
    """Views: query [.., .., heads, head_dim]; key and value [.., .., groups, head_dim]."""
    heads, groups, head_dim, interleaved = of
    if not interleaved:
        each = mixed.view(*mixed.shape[:2], heads + 2 * groups, head_dim)
        return torch.split_with_sizes(each, (heads, groups, groups), 2)
    each = mixed.unflatten(-1, (groups, heads // groups + 2, head_dim))
    return each[..., :-2, :].flatten(-3, -2), each[..., -2, :], each[..., -1, :]


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
