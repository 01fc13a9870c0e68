"""Query, key and value out of one joint projection, and their gradients back into one.

    interleaved        each group of heads has its queries, its key, its value:  [q.. k v] [q.. k v] ...
    not interleaved    all queries, all keys, all values:                        [Q; K; V]

Next: `multihead_attention.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatfsdp.kernels.join import join_heads


class QKV(NamedTuple):
    """query [.., .., heads, head_dim]; key and value [.., .., groups, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


def split_qkv(mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool) -> QKV:
    """Views of `mixed`; backward copies the three gradients into one new tensor, in one pass.

    Where heads are interleaved, and several but not all share a key (1 < groups < heads), the queries are a
    copy: no strides describe them.

    Args:
        mixed: [.., .., (heads + 2 groups) * head_dim].
        groups: heads of key and value; a divisor of `heads`.

    Raises:
        ValueError: if the last dimension is another one.
    """
    if mixed.shape[-1] != (heads + 2 * groups) * head_dim:
        raise ValueError(
            f"a joint projection of {heads} query heads and {groups} groups of {head_dim} elements each has "
            f"{(heads + 2 * groups) * head_dim} of them, not {mixed.shape[-1]}"
        )
    query, key, value = _Split.apply(mixed, heads, groups, head_dim, interleaved)
    return QKV(query.flatten(-3, -2), key, value)


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
        # Such as the gradient of a sum, which is one number with strides of 0.
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        joint = join_heads(query.flatten(-3, -2), key, value, interleaved=ctx.interleaved)
        return joint, None, None, None, None


def _views(
    mixed: Tensor, heads: int, groups: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """query [.., .., groups, heads / groups, head_dim]; key and value [.., .., groups, head_dim]."""
    each = heads // groups
    if interleaved:
        grouped = mixed.unflatten(-1, (groups, each + 2, head_dim))
        return grouped[..., :each, :], grouped[..., each, :], grouped[..., each + 1, :]
    queries, keys, values = mixed.unflatten(-1, (-1, head_dim)).split((heads, groups, groups), dim=-2)
    return queries.unflatten(-2, (groups, each)), keys, values
