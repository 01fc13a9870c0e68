"""Norms, the embedding and the rotary tables of transformers' models, computed by our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.fused_part import FusedPart
from flatfsdp.compat.transformers.fused.why_not import no_tensor
from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.mixed import innermost
from flatfsdp.layers.calls import NormOf
from flatfsdp.layers.embedding import look_up
from flatfsdp.layers.norm import norm
from flatfsdp.layers.normalized import NormKind

CosSin = tuple[Tensor, Tensor]

_TABLES = Attribute[CosSin | None]("_flatfsdp_tables", None)
"""Attached to the cosines of a forward: cosines and sines, FP32 [rows, head_dim / 2]."""


class FusedNorm(FusedPart, nn.Module):
    """An RMSNorm of transformers, or nn.LayerNorm, in one kernel forward and one backward."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalizes with our kernel if it supports the dtypes."""
        of = norm_of(self)
        if of.weight.dtype != hidden_states.dtype or no_tensor("it", self):
            return super().forward(hidden_states)
        return norm(hidden_states, of.weight, of.bias, of.kind)


def norm_of(module: Any) -> NormOf:
    """The parameters and kind of a fused norm."""
    if innermost(type(module)) is nn.LayerNorm:
        return NormOf(module.weight, module.bias, NormKind(module.eps, rms=False, zero_centered=False))
    return NormOf(module.weight, None, NormKind(module.variance_epsilon, rms=True, zero_centered=False))


def is_layer_norm(module: nn.Module) -> bool:
    """Whether a module is PyTorch's LayerNorm, with weight and bias."""
    return type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None


class FusedEmbedding(FusedPart, nn.Embedding):
    """The token embedding, whose gradient is added to an FP32 main_grad where an engine has one."""

    def forward(self, input: Tensor) -> Tensor:
        """Looks up the rows of `input`."""
        if no_tensor("it", self):
            return super().forward(input)
        return look_up(self, self.weight, input, self.padding_idx, self._fusion.fuse_wgrad_accumulation)


class FusedRotary(FusedPart, nn.Module):
    """Cosines and sines of transformers, computed once per forward, with FP32 copies attached."""

    def forward(self, x: Tensor, position_ids: Tensor) -> CosSin:
        """Cosines and sines in x's dtype, [1 or batch, seq, head_dim] each."""
        plain = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        cos, sin = (each.to(x.dtype) for each in plain)
        _TABLES.leave(cos, _halves(*plain))
        return cos, sin


def tables_of(position_embeddings: CosSin) -> CosSin:
    """Cosines and sines, FP32 [rows, head_dim / 2]: for all positions, or all tokens if sequences differ.

    Args:
        position_embeddings: cosines and sines, [1 or batch, seq, head_dim] each.
    """
    kept = _TABLES.of(position_embeddings[0])
    # A cast in between drops the attached tables.
    return _halves(*position_embeddings) if kept is None else kept


def _halves(cos: Tensor, sin: Tensor) -> CosSin:
    half = cos.shape[-1] // 2
    first, second = (each[..., :half].float().reshape(-1, half).contiguous() for each in (cos, sin))
    return first, second
