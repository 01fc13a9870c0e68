"""Attention on the meta device, with the memory and the operations of a GPU's fused kernels.

PyTorch computes attention on the meta device in separate steps, which would keep a [queries, keys] matrix for
each head.  cuDNN, flash and efficient attention keep query, key, value, the result and the logarithm of the
sum of each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

_library = library.Library("flatfsdp_plan", "FRAGMENT")
_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, bool is_causal) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define("attention" + _SCHEMA)
_library.define("attention_backward" + _BACKWARD_SCHEMA)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    # Its dimensions lie in memory in the order of the query's, so that what follows needs no copy.
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], value.shape[-1])
    out = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_library.impl("attention", _forward, "Meta")
_library.impl("attention_backward", _backward, "Meta")
FORWARD = torch.ops.flatfsdp_plan.attention
BACKWARD = torch.ops.flatfsdp_plan.attention_backward


def _flops(query: Any, key: Any, value: Any, is_causal: bool) -> int:
    """Operations of both GEMMs; a causal mask leaves half of them."""
    *heads, rows, width = query
    gemms = 2 * rows * key[-2] * (width + value[-1])
    for size in heads:
        gemms *= size
    return gemms // 2 if is_causal else gemms


@register_flop_formula(FORWARD)
def _flops_forward(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, **_: Any) -> int:
    return _flops(query, key, value, is_causal)


@register_flop_formula(BACKWARD)
def _flops_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, log_sums: Any, is_causal: bool, **_: Any
) -> int:
    return 2 * _flops(query, key, value, is_causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        out, log_sums = FORWARD(query, key, value, mask, is_causal)
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums, _ = ctx.saved_tensors
        return (*BACKWARD(grad, query, key, value, out, log_sums, ctx.is_causal), None, None)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` as one operator."""
    out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal)
    return out
