"""`FusedAttention`: norm and packed projection, rotation, attention and output projection.

In:   [batch, seq, hidden], before the norm;  out: the same shape, and the norm's input.
Next: `layer.py` adds the residual.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused import lora
from flatfsdp.compat.transformers.fused.half import FusedHalf, HalfMaps
from flatfsdp.compat.transformers.fused.small import norm_of, tables_of
from flatfsdp.compat.transformers.fused.why_not import captures_attentions, no_linear
from flatfsdp.layers.attention import sdpa
from flatfsdp.layers.attention.heads import HeadsOf, add_to_slices, heads_of_projection
from flatfsdp.layers.calls import linear, norm_linear, prepare


class FusedAttention(FusedHalf):
    """Self-attention of transformers; a direct call runs transformers' own forward."""

    linear_maps = ("qkv", "proj")
    first_at, second_at, dropout_index, takes_lora = "qkv", "out", 0, True
    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    is_causal: bool
    attention_dropout: float
    attn_dropout: nn.Dropout

    def maps(self, norm: nn.Module) -> HalfMaps | str:
        """The linear maps of this call, or the reason why transformers has to compute it."""
        return "attention weights are returned" if captures_attentions() else super().maps(norm)

    def attend(
        self, hidden_states: Tensor, norm: nn.Module, maps: HalfMaps, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Computes the branch without its residual; also returns the residual, which is the norm's input.

        Args:
            hidden_states: [batch, seq, hidden].
            norm: the norm before the projection.
            maps: the linear maps.
            arguments: those of transformers' own forward, by name.
        """
        projections = self._first()
        adapted = [lora.adds(each) for each in projections]
        ready = prepare(self, hidden_states, *(each for each in maps if each is not None))
        called = norm_linear(ready, norm_of(norm), keep=any(adapted))
        mixed = called.out
        if any(adapted):
            assert called.normalized is not None
            mixed = self._with_adapters(mixed, called.normalized.view(hidden_states.shape), projections)
        query, key, value = self._heads(mixed, arguments.get("position_embeddings"))
        cache = arguments.get("past_key_values")
        if cache is not None:
            # A decoder with cross-attention has one cache for each kind of attention.
            cache = getattr(cache, "self_attention_cache", cache)
            key, value = cache.update(key, value, self.layer_idx)
        context = self._core(query, key, value, arguments).flatten(2)
        out = self._second()(context) if maps.second is None else linear(ready.of_next(context))
        return out, called.summed.view(hidden_states.shape)

    # ---- parts ------------------------------------------------------------------------------------------

    def _own_reason(self) -> str | None:
        is_other = getattr(self, "is_cross_attention", False) or getattr(
            self, "reorder_and_upcast_attn", False
        )
        return "it is cross-attention, or upcasts" if is_other else None

    def _second_reason(self) -> str | None:
        return no_linear(self._family.out, self._second(), transposed=self._family.transposed)

    def _with_adapters(self, mixed: Tensor, normalized: Tensor, projections: list[Any]) -> Tensor:
        deltas, start = [], 0
        for module in projections:
            delta = lora.delta_of(module, normalized) if lora.adds(module) else None
            if delta is not None:
                deltas.append((start, delta.to(mixed.dtype)))
            start += module.out_features if hasattr(module, "out_features") else module.nf
        return add_to_slices(mixed, deltas) if deltas else mixed

    def _heads(self, mixed: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value: [batch, heads, seq, head_dim] views of [batch, seq, heads, head_dim] tensors."""
        head_dim, width = self.head_dim, mixed.shape[-1] // self.head_dim
        if self._family.rotary:
            groups = width // (self.num_key_value_groups + 2)
            heads = width - 2 * groups
        else:
            heads = groups = width // 3
        batch, seq = mixed.shape[:2]
        tables = None if position_embeddings is None else tables_of(position_embeddings)
        is_flat = tables is not None and tables[0].shape[0] != seq
        if is_flat:
            # Rotation is per token, so sequences with their own positions are treated as one long one.
            mixed = mixed.reshape(1, batch * seq, -1)
        found = heads_of_projection(
            mixed,
            HeadsOf(heads, groups, head_dim, False),
            tables,
            batch_first=True,
            q_norm=self._modules.get("q_norm"),
            k_norm=self._modules.get("k_norm"),
        )
        whole = [x.unflatten(1, (batch, seq)).squeeze(0) for x in found] if is_flat else found
        query, key, value = (x.transpose(1, 2) for x in whole)
        return query, key, value

    def _core(self, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Attention: [batch, seq, heads, head_dim]."""
        mask = arguments.get("attention_mask")
        module = sys.modules["transformers.modeling_utils"]
        eager = sys.modules[self._family.module].eager_attention_forward
        interface = module.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self._dropout() if self.training else 0.0
        is_sdpa = interface.__module__ == "transformers.integrations.sdpa_attention"
        is_whole = query.shape[2] == key.shape[2]
        if is_sdpa and (is_whole if mask is None else mask.dtype == torch.bool):
            is_causal = mask is None and self.is_causal
            out = sdpa.attention(
                query, key, value, mask, is_causal=is_causal, dropout=dropout, scale=self.scaling
            )
            return out.transpose(1, 2)
        others = {k: v for k, v in arguments.items() if k not in _OWN_ARGUMENTS}
        if self._family.window is not None:
            owner = self if self._family.window == "attention" else self.config
            others["sliding_window"] = getattr(owner, "sliding_window", None)
        found: Tensor = interface(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **others
        )[0]
        return found

    def _dropout(self) -> float:
        return float(self.attention_dropout if self._family.rotary else self.attn_dropout.p)


_OWN_ARGUMENTS = ("attention_mask", "past_key_values", "position_embeddings")
"""Arguments of transformers' attention itself; it passes all others to its attention functions."""
