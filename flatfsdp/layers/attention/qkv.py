"""Splits a packed projection into query, key and value, and joins their gradients in backward.

    interleaved        each group of heads has its queries, its key and its value:  [q.. k v] [q.. k v] ...
    not interleaved    all queries, then all keys, then all values:                 [Q; K; V]

Next: `multihead.py`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    if q_norm is None or k_norm is None:
        if tables is None:
            return split_qkv(mixed, *of)
        cos, sin = tables[:2]
        return split_and_rotate(mixed, *of, cos, sin, batch_first=batch_first, neighbours=neighbours)
    query, key, value = split_qkv(mixed, *of)
    if norm_first:
        query, key = q_norm(query), k_norm(key)
    if tables is not None:
        cos, sin = tables[:2]
        query, key = (
            apply_rotary(x, cos, sin, batch_first=batch_first, interleaved=neighbours) for x in (query, key)
        )
    if not norm_first:
        query, key = q_norm(query), k_norm(key)
    if torch.is_grad_enabled():
        # Attention saves the value for backward: a view would keep the whole packed projection alive.
        value = value.contiguous()
    return QKV(query, key, value)


def split_qkv(mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool) -> QKV:
    """Views of `mixed` as query, key and value; backward joins the three gradients in one pass.

    With interleaved heads and 1 < groups < heads the queries are a copy, because no strides describe them.

    Args:
        mixed: [.., .., (heads + 2 groups) * head_dim].
        heads: number of query heads.
        groups: heads of key and value; a divisor of `heads`.
        head_dim: elements of a head.
        interleaved: whether each group of heads is stored as its queries, its key, its value.

    Raises:
        ValueError: if the last dimension has another size.
    """
    _check_width(mixed, heads, groups, head_dim)
    query, key, value = _Split.apply(mixed, heads, groups, head_dim, interleaved)
    return QKV(query.flatten(-3, -2), key, value)


def _check_width(mixed: Tensor, heads: int, groups: int, head_dim: int) -> None:
    if mixed.shape[-1] != (heads + 2 * groups) * head_dim:
        raise ValueError(
            f"a packed projection of {heads} query heads and {groups} groups of {head_dim} elements each has "
            f"{(heads + 2 * groups) * head_dim} of them, not {mixed.shape[-1]}"
        )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.interleaved = interleaved
        return _views(mixed, heads, groups, head_dim, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = map(_readable, grads)
        pack = join_heads(query.flatten(-3, -2), key, value, interleaved=ctx.interleaved)
        return pack, None, None, None, None


def _readable(grad: Tensor) -> Tensor:
    """A gradient that the kernel can read: the one of a sum is expanded, with strides of 0."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _views(
    mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Views: query [.., .., groups, heads / groups, head_dim]; key and value [.., .., groups, head_dim]."""
    each = heads // groups
    if interleaved:
        grouped = mixed.unflatten(-1, (groups, each + 2, head_dim))
        return grouped[..., :each, :], grouped[..., each, :], grouped[..., each + 1, :]
    queries, keys, values = _of_kinds(mixed, heads, groups, head_dim)
    return queries.unflatten(-2, (groups, each)), keys, values


def _heads(
    mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Views: query [.., .., heads, head_dim]; key and value [.., .., groups, head_dim]."""
    if interleaved:
        query, key, value = _views(mixed, heads, groups, head_dim, interleaved)
        return query.flatten(-3, -2), key, value
    return _of_kinds(mixed, heads, groups, head_dim)


def _of_kinds(mixed: Tensor, heads: int, groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a projection that is not interleaved, in the shapes of `_heads`."""
    first, second, _ = mixed.shape
    each = mixed.view(first, second, heads + 2 * groups, head_dim)
    query, key, value = torch.split_with_sizes(each, (heads, groups, groups), 2)
    return query, key, value


def split_and_rotate(
    mixed: Tensor,
    heads: int,
    groups: int,
    head_dim: int,
    interleaved: bool,
    cos: Tensor,
    sin: Tensor,
    *,
    batch_first: bool,
    neighbours: bool,
) -> QKV:
    """Combines `split_qkv` and `apply_rotary` in one autograd node instead of three.

    If `mixed` needs a gradient, the values are a copy.

    Args:
        mixed: [seq, batch, (heads + 2 groups) * head_dim], or batch first.
        heads: number of query heads.
        groups: heads of key and value; a divisor of `heads`.
        head_dim: elements of a head.
        interleaved: whether each group of heads is stored as its queries, its key, its value.
        cos: FP32 [at least seq, n], contiguous; the first 2 n elements of each head are rotated.
        sin: the shape of `cos`.
        batch_first: whether the batch is the first dimension.
        neighbours: RoPE rotates pairs of neighbouring elements instead of pairs from the two halves.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    _check_width(mixed, heads, groups, head_dim)
    heads_of = HeadsOf(heads, groups, head_dim, interleaved)
    return QKV(*_SplitAndRotate.run(mixed, cos, sin, heads_of, batch_first, neighbours))


class _SplitAndRotate(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        of: HeadsOf,
        batch_first: bool,
        neighbours: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.of = of
        ctx.way = way = {"batch_first": batch_first, "interleaved": neighbours}
        ctx.save_for_backward(cos, sin)
        query, key, value = _heads(mixed, *of)
        query, key = rope(query, cos, sin, **way), rope(key, cos, sin, **way)
        # Attention saves the value for backward: a view would keep the whole packed projection alive.
        return query, key, value.contiguous() if ctx.needs_input_grad[0] else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        query, key, value = map(_readable, grads)
        of: HeadsOf = ctx.of
        if of.interleaved:
            query, key = (rope(x, cos, sin, **ctx.way, inverse=True) for x in (query, key))
            return join_heads(query, key, value, interleaved=True), None, None, None, None, None
        pack = join_heads(query, key, value, interleaved=False)
        # Queries and keys are adjacent: one launch for both.
        heads = pack.view(*pack.shape[:2], of.heads + 2 * of.groups, of.head_dim)
        turned = heads.narrow(2, 0, of.heads + of.groups)
        rope(turned, cos, sin, **ctx.way, inverse=True, in_place=True)
        return pack, None, None, None, None, None
