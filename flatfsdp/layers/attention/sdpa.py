"""torch's scaled dot-product attention, with backends tried in our own order.

    no mask, Hopper     cuDNN, flash, efficient, math: cuDNN is 1.9 times as fast as flash
    no mask, else       torch's own order
    with a mask         efficient, math: flash takes no mask, and with one cuDNN's backward gives NaN on
                        Hopper for lengths of 64 modulo 128 (pytorch issue 196678)

Backends that the user has disabled stay disabled.  Under torch.use_deterministic_algorithms(True) torch
skips cuDNN; with nvidia-cudnn-frontend, attention without mask and dropout is nevertheless cuDNN's, with its
ordered backward (`kernels/attention/ordered.py`).  cuDNN, flash and all CPU backends accept fewer heads of
key and value than of query (GQA); for the others the heads are repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatfsdp.kernels.attention.ordered import attention_backward, is_ordered

_HOPPER = (9, 0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Scaled dot-product attention, softmax(scale * query key^T) value: [batch, heads, queries, head_dim].

    Args:
        query: [batch, heads, queries, head_dim], of any strides.
        key: [batch, groups, keys, head_dim], of any strides; `groups` divides `heads`.
        value: the shape of `key`.
        mask: bool, broadcastable to [batch, heads, queries, keys], True where a query sees a key.  A query
            that sees no key gives zeros.
        is_causal: query i sees keys 0 to i; cannot be combined with a mask.
        dropout: probability of dropping an attention weight.
        scale: default: 1 / sqrt(head_dim).
    """
    if mask is None and dropout == 0 and _wants_ordered():
        factor = query.shape[3] ** -0.5 if scale is None else scale
        if is_ordered(query, key, value, scale=factor, is_causal=is_causal):
            ordered: Tensor = _Ordered.apply(query, key, value, is_causal, factor)
            return ordered
    is_grouped = key.shape[1] != query.shape[1]
    if is_grouped and query.is_cuda and (mask is not None or not _takes_groups(query, key, value, is_causal)):
        # A real copy: the efficient backend is wrong on heads of stride 0 (pytorch issue 191937).
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        is_grouped = False
    with _backends(query, mask):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=is_grouped,
        )


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, is_causal, True)
    return torch.backends.cuda.can_use_cudnn_attention(params) or torch.backends.cuda.can_use_flash_attention(
        params
    )


def _wants_ordered() -> bool:
    return (
        not torch.compiler.is_compiling()
        and torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


class _Ordered(torch.autograd.Function):
    """cuDNN's attention, whose forward repeats its bits in any case, with its ordered backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
        # The operator itself, as `scaled_dot_product_attention` would skip cuDNN.
        out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        logsumexp = logsumexp.view(*query.shape[:3], 1)
        grads = attention_backward(
            query, key, value, out, grad, logsumexp, scale=ctx.scale, is_causal=ctx.is_causal
        )
        return *grads, None, None


_IS_ON: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def _backends(query: Tensor, mask: Tensor | None) -> AbstractContextManager[object]:
    if not query.is_cuda:
        return nullcontext()
    if not torch.compiler.is_compiling():
        _let_torch_choose_once(query.device)
    if mask is not None:
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    elif torch.cuda.get_device_capability(query.device) == _HOPPER:
        order = list(_IS_ON)
        if not torch.compiler.is_compiling():
            return _InOrder([backend.value for backend in order])
    else:
        return nullcontext()
    return sdpa_kernel([backend for backend in order if _IS_ON[backend]()], set_priority=True)


@functools.cache
def _let_torch_choose_once(device: torch.device) -> None:
    """Makes torch determine its own backend order, which it does only at its first choice of a backend.

    Otherwise `_InOrder` would save an uninitialised order and restore it for other attention in the process.
    """
    query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    torch._fused_sdp_choice(query, query, query)


class _InOrder:
    """Context in which torch tries backends in a given order; disabled ones stay disabled.

    `sdpa_kernel` does the same, but takes longer on the host than the attention itself.
    """

    def __init__(self, order: list[int]) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._before = torch._C._get_sdp_priority_order()
        torch._C._set_sdp_priority_order(self._order)

    def __exit__(self, *exc: object) -> None:
        torch._C._set_sdp_priority_order(self._before)
