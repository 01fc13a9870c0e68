"""`DotProductAttention`: attention between the query, key and value projections and the output projection.

In:   query, key, value [seq, batch, heads, head_dim] ("sbhd"), or batch first ("bshd").
Out:  [seq, batch, heads * head_dim], or batch first.
Next: `sdpa.py` chooses a backend, `masks.py` decides which keys a query sees.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flatfsdp.comm.rng import GetTracker
from flatfsdp.contract.tensor_parallel import TensorParallel
from flatfsdp.fp8.state_dict import WithoutExtraState
from flatfsdp.layers.attention.masks import (
    CAUSAL,
    UNLIMITED,
    Window,
    WindowMasks,
    resolve_window,
    visible_keys,
)
from flatfsdp.layers.attention.sdpa import attention
from flatfsdp.layers.dropout import OwnNumbers
from flatfsdp.layers.shared import Shared
from flatfsdp.layers.te_arguments import takes_te_arguments, takes_te_call_arguments


class DotProductAttention(WithoutExtraState, Shared):
    """Scaled dot-product attention, softmax(scale * q k^T) v, with Transformer Engine's arguments.

    Query, key and value may have any strides (views of one packed projection, for example); none is copied.

    Args:
        num_attention_heads: heads of the query.
        kv_channels: elements of a head.
        num_gqa_groups: heads of key and value, a divisor of `num_attention_heads`; default:
            `num_attention_heads`.
        attention_dropout: probability of dropping an attention weight in training.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: "causal", "no_mask", "padding", "padding_causal" or "arbitrary".
        window_size: (left, right): query i sees keys i - left to i + right only; -1 means no limit.  Needs a
            boolean mask [queries, keys]; each module keeps its own.
        softmax_scale: default: 1 / sqrt(kv_channels).
        tp_group: tensor-parallel ranks that share the heads; the head counts above are totals over the group.
        tp_size: size of the group; may be left out.
        sequence_parallel: has no effect here: each rank attends with some heads over the whole sequence.
        get_rng_state_tracker: returns the random-number tracker for the dropout of this rank's heads;
            default: an `RNGTracker`.

    Attributes:
        num_attention_heads, num_gqa_groups: heads and groups of this rank.

    Raises:
        ValueError: if options contradict each other, or the heads or groups do not divide evenly over the
            ranks.
    """

    @takes_te_arguments
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        *,
        softmax_scale: float | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        get_rng_state_tracker: GetTracker | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self._parallel = parallel = TensorParallel.of(name, tp_group, tp_size, sequence_parallel)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(
                f"num_gqa_groups is {groups}; it must divide num_attention_heads, {num_attention_heads}"
            )
        if qkv_format not in ("sbhd", "bshd"):
            raise ValueError(f"qkv_format is {qkv_format!r}; it must be 'sbhd' or 'bshd'")
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout is {attention_dropout}; it must be 0 <= p < 1")
        resolve_window(attn_mask_type, window_size)
        self.num_attention_heads = parallel.share(name, "num_attention_heads", num_attention_heads)
        self.num_gqa_groups = parallel.share(name, "num_gqa_groups", groups)
        self.kv_channels = kv_channels
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.softmax_scale = softmax_scale
        self._windows = WindowMasks()
        self._numbers = OwnNumbers(get_rng_state_tracker, parallel.ranks)

    @takes_te_call_arguments
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Tensor:
        """Computes attention of `query` over `key` and `value`.

        Args:
            query: [seq, batch, num_attention_heads, kv_channels], or batch first.
            key: [seq, batch, num_gqa_groups, kv_channels], or batch first.
            value: the shape of `key`.
            attention_mask: bool, True where a key is masked out: [batch, 1, 1, keys] for padding types,
                broadcastable to [batch, heads, queries, keys] for "arbitrary", with the heads of this rank or
                of all ranks.  A query that sees no key gives zeros.
            attn_mask_type: overrides the constructor's for this call.
            window_size: overrides the constructor's for this call.
            checkpoint_core_attention: save only query, key and value, and recompute the rest in backward.

        Returns:
            [seq, batch, heads * head_dim], or [batch, seq, heads * head_dim], in the query's dtype.

        Raises:
            ValueError: if shapes or masks do not fit.
        """
        self._check(query, key, value)
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        window = resolve_window(mask_type, self.window_size if window_size is None else window_size)
        query, key, value = (self._heads_first(x) for x in (query, key, value))
        mask = self._mask(query, key, attention_mask, mask_type, window)
        with self._numbers.drawn(self.training and self.attention_dropout > 0):
            if checkpoint_core_attention and torch.is_grad_enabled():
                out = checkpoint(self._attend, query, key, value, mask, window, use_reentrant=False)
            else:
                out = self._attend(query, key, value, mask, window)
        # As the inputs, with the heads of a token side by side.
        out = out.permute(2, 0, 1, 3) if self.qkv_format == "sbhd" else out.transpose(1, 2)
        return out.flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: Window
    ) -> Tensor:
        if query.numel() == 0:
            return query
        return attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None and window == CAUSAL,
            dropout=self.attention_dropout if self.training else 0.0,
            scale=self.softmax_scale,
        )

    def _mask(
        self, query: Tensor, key: Tensor, attention_mask: Tensor | None, mask_type: str, window: Window
    ) -> Tensor | None:
        """The mask of visible keys, or None where the backends need none."""
        batch, heads, queries, keys = (*query.shape[:3], key.shape[2])
        ranks = self._parallel.ranks
        has_heads = attention_mask is not None and attention_mask.dim() == 4
        if attention_mask is not None and has_heads and attention_mask.shape[1] == ranks.size * heads:
            # Those of all ranks.
            attention_mask = attention_mask.chunk(ranks.size, 1)[ranks.rank]
        mask = visible_keys(attention_mask, mask_type, (batch, heads, queries, keys))
        if window == UNLIMITED or (mask is None and window == CAUSAL):
            return mask
        if window != CAUSAL and queries != keys:
            raise ValueError(f"window_size={window} needs as many queries as keys, not {queries} and {keys}")
        seen = self._windows.get(queries, keys, window, query.device)
        return seen if mask is None else mask & seen

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        counts = (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups)
        for name, x, heads in zip(("query", "key", "value"), (query, key, value), counts, strict=True):
            if x.dim() != 4 or tuple(x.shape[2:]) != (heads, self.kv_channels):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; qkv_format={self.qkv_format!r} needs 4 dimensions, "
                    f"the last two ({heads}, {self.kv_channels})"
                )

    def _heads_first(self, x: Tensor) -> Tensor:
        """A [batch, heads, seq, head_dim] view."""
        return x.permute(1, 2, 0, 3) if self.qkv_format == "sbhd" else x.transpose(1, 2)

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        return (
            f"{self.num_attention_heads} heads of {self.kv_channels}, {self.num_gqa_groups} groups, "
            f"{self.attn_mask_type}, dropout={self.attention_dropout}"
        )
