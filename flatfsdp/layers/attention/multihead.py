"""`MultiheadAttention`: a packed query, key and value projection, attention, and the output projection.

In:   [seq, batch, hidden] ("sbhd"), or [batch, seq, hidden] ("bshd");  out: the same shape.

    layernorm_qkv, or qkv    -> split_qkv -> q_norm, k_norm and RoPE -> core_attention -> proj

Next: `layers/transformer.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.layers.attention.dot_product import DotProductAttention
from flatfsdp.layers.attention.heads import QKV, HeadsOf, heads_of_projection
from flatfsdp.layers.attention.masks import Window
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding, RotaryTables
from flatfsdp.layers.layer_options import (
    AttentionOptions,
    LinearOptions,
    MatmulOptions,
    NormOptions,
    only,
    parallel_of,
)
from flatfsdp.layers.linear import LayerNormLinear, Linear
from flatfsdp.layers.norm import L2Normalization, LayerNorm, RMSNorm
from flatfsdp.layers.shared import InitMethod, Shared
from flatfsdp.layers.te_arguments import takes_te_arguments, takes_te_call_arguments

Tables = RotaryTables | tuple[Tensor, Tensor]


class MultiheadAttention(Shared):
    """Self-attention with Transformer Engine's arguments and parameter names.

    Args:
        hidden_size: size of input and output.
        num_attention_heads: heads of the query.
        kv_channels: elements of a head; default: hidden_size / num_attention_heads.
        attention_dropout: probability of dropping an attention weight in training.
        layernorm_epsilon: epsilon of the norm with `input_layernorm`.
        init_method: fills the weights of the query, key and value projection.
        output_layer_init_method: fills the weight of the output projection.
        attn_mask_type: "causal", "no_mask", "padding", "padding_causal" or "arbitrary".
        window_size: (left, right): query i sees keys i - left to i + right only; -1 means no limit.
        num_gqa_groups: heads of key and value; default: `num_attention_heads`.
        return_bias: return (out, bias) instead of adding the output projection's bias.
        return_layernorm_output: return the norm's result as well.
        input_layernorm: begin with a norm.
        qkv_format: "sbhd" ([seq, batch, hidden]) or "bshd" ([batch, seq, hidden]).
        options: options of all of a block's layers, listed in `AttentionOptions`.  sequence_parallel needs
            set_parallel_mode and "sbhd".

    Attributes:
        layernorm_qkv, or qkv: the query, key and value projection, with or without a norm.
        q_norm, k_norm: norms of queries and keys, or None.
        core_attention: the `DotProductAttention`.
        proj: the output projection.

    Raises:
        ValueError: if options contradict each other, or the heads or groups do not divide evenly over the
            ranks.
    """

    @takes_te_arguments
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        *,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        num_gqa_groups: int | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        qkv_format: str = "sbhd",
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        self._parallel = parallel_of("MultiheadAttention", AttentionOptions, options)
        is_split = options.get("set_parallel_mode", False)
        if self._parallel.sequence_parallel:
            if not is_split:
                raise ValueError("sequence_parallel needs set_parallel_mode=True: attention sees all tokens")
            if qkv_format != "sbhd":
                raise ValueError(f"sequence_parallel splits dimension 0: use 'sbhd', not {qkv_format!r}")
        if return_layernorm_output and not input_layernorm:
            raise ValueError("return_layernorm_output needs input_layernorm=True")
        if kv_channels is None:
            kv_channels, rest = divmod(hidden_size, num_attention_heads)
            if rest:
                raise ValueError(
                    f"{num_attention_heads} heads do not divide hidden_size {hidden_size}; pass kv_channels"
                )
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.input_layernorm = input_layernorm
        is_pack = options.get("fuse_qkv_params", False)
        self.qkv_weight_interleaved = is_pack and options.get("qkv_weight_interleaved", True)
        self.rotary_pos_interleaved = options.get("rotary_pos_interleaved", False)
        self.qk_norm_before_rope = options.get("qk_norm_before_rope", False)
        # First: it divides the heads among the ranks, and the projection is laid out by those of this rank.
        self.core_attention = core = DotProductAttention(
            num_attention_heads,
            kv_channels,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            tp_group=options.get("tp_group") if is_split else None,
            tp_size=options.get("tp_size", 1) if is_split else 1,
            sequence_parallel=options.get("sequence_parallel", False),
            get_rng_state_tracker=options.get("get_rng_state_tracker"),
        )
        self._heads_of = HeadsOf(
            core.num_attention_heads, core.num_gqa_groups, kv_channels, self.qkv_weight_interleaved
        )
        # Over all ranks: linear layers are given whole sizes, and divide them.
        query_size = num_attention_heads * kv_channels
        key_size = (num_gqa_groups or num_attention_heads) * kv_channels
        sizes = {"query": query_size, "key": key_size, "value": key_size}
        of_maps, bias = only(MatmulOptions, options), options.get("bias", True)
        # Rows of interleaved groups are one part, which the ranks split between groups.
        are_apart = is_pack and not self.qkv_weight_interleaved
        pack: LinearOptions = {
            **of_maps,
            "init_method": init_method,
            "parameters_split": None if is_pack else sizes,
            "parallel_mode": "column" if is_split else None,
            "partition_sizes": tuple(sizes.values()) if are_apart else None,
        }
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                sum(sizes.values()),
                layernorm_epsilon,
                bias=bias,
                return_layernorm_output=return_layernorm_output,
                **only(NormOptions, options),
                **pack,
            )
        else:
            self.qkv = Linear(hidden_size, sum(sizes.values()), bias=bias, **pack)
        self.rotary = None
        base = options.get("rotary_base")
        if base is not None:
            self.rotary = RotaryPositionEmbedding(
                kv_channels, rotary_base=base, interleaved=self.rotary_pos_interleaved
            )
        splits_norms = is_split and self._parallel.ranks.size > 1
        self.q_norm = _qk_norm(kv_channels, options, is_split=splits_norms)
        self.k_norm = _qk_norm(kv_channels, options, is_split=splits_norms)
        # Split by its columns, as the context is split by heads: ranks add up their results.
        back: LinearOptions = {
            **of_maps,
            "return_bias": return_bias,
            "init_method": output_layer_init_method,
            "parallel_mode": "row" if is_split else None,
        }
        self.proj = Linear(query_size, hidden_size, bias=bias, **back)

    @takes_te_call_arguments
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tables | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Self-attention: [seq, batch, hidden_size], or batch first, to the same shape.

        Args:
            hidden_states: [seq, batch, hidden_size], or batch first; with `sequence_parallel` this rank's
                part of the sequence.
            attention_mask: bool, True where a key is masked out; needed by padding and "arbitrary" mask
                types.
            attn_mask_type: overrides the constructor's for this call.
            window_size: overrides the constructor's for this call.
            is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts in
                every call.
            checkpoint_core_attention: save only query, key and value, and recompute attention in backward.
            rotary_pos_emb: tables of `RotaryPositionEmbedding`, or (cos, sin), FP32 [at least seq, n].
            return_residual: return the layer's input as well, for a residual connection around the layer.

        Returns:
            out, or a tuple of out, the bias with `return_bias`, norm(hidden_states) with
            `return_layernorm_output` and hidden_states with `return_residual`.

        Raises:
            ValueError: if a shape, mask or option does not fit, or a size does not suit FP8.
            TypeError: if a dtype does not fit, or `rotary_pos_emb` is a single tensor.
            RuntimeError: if the device has no FP8.
        """
        if hidden_states.dim() != 3:
            raise ValueError(
                f"MultiheadAttention: hidden_states has shape {tuple(hidden_states.shape)}; it has to be "
                f"[seq, batch, hidden_size], in the order of {self.core_attention.qkv_format!r}"
            )
        mixed, *passed_on = self._project(hidden_states, is_first_microbatch, return_residual)
        query, key, value = self._split(mixed, rotary_pos_emb)
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
        )
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        results = (*(out if self.return_bias else (out,)), *passed_on)
        return results if len(results) > 1 else out

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward deferred (`delay_wgrad_compute`).

        Raises:
            RuntimeError: if no backward has deferred any.
        """
        self.proj.backward_dw()
        (self.layernorm_qkv if self.input_layernorm else self.qkv).backward_dw()

    def _project(
        self, hidden_states: Tensor, is_first_microbatch: bool | None, return_residual: bool
    ) -> tuple[Tensor, ...]:
        """The packed projection, followed by what `forward` returns after its result."""
        if self.input_layernorm:
            results = self.layernorm_qkv(
                hidden_states, is_first_microbatch=is_first_microbatch, return_residual=return_residual
            )
            return results if isinstance(results, tuple) else (results,)
        mixed = self.qkv(hidden_states, is_first_microbatch=is_first_microbatch)
        return (mixed, hidden_states) if return_residual else (mixed,)

    def _split(self, mixed: Tensor, tables: Tables | None) -> QKV:
        """Query, key and value, normalized and rotated."""
        batch_first = self.core_attention.qkv_format == "bshd"
        if tables is None and self.rotary is not None:
            # The whole sequence: with sequence_parallel, the projection has gathered it.
            tables = self.rotary(mixed.shape[1 if batch_first else 0], mixed.device)
        if isinstance(tables, Tensor):
            raise TypeError(
                "rotary_pos_emb is one tensor, perhaps of angles; pass what RotaryPositionEmbedding returns, "
                "or (cos, sin) of the angles, [positions, dim / 2] each"
            )
        if isinstance(tables, RotaryTables) and tables.interleaved != self.rotary_pos_interleaved:
            raise ValueError(
                f"rotary_pos_emb is interleaved={tables.interleaved}; make rotary_pos_interleaved the same"
            )
        return heads_of_projection(
            mixed,
            self._heads_of,
            tables,
            batch_first=batch_first,
            neighbours=self.rotary_pos_interleaved,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_first=self.qk_norm_before_rope,
        )


def _qk_norm(channels: int, options: AttentionOptions, *, is_split: bool) -> nn.Module | None:
    """Makes the norm of queries or keys that `options` ask for; None if they ask for none.

    Args:
        channels: elements of a head.
        options: the layer's options; only qk_norm_type, qk_norm_eps, params_dtype and device are read.
        is_split: whether tensor-parallel ranks share the heads, so that gradients have to be summed over
            them.

    Raises:
        ValueError: for an unknown type.
    """
    kind, eps = options.get("qk_norm_type"), options.get("qk_norm_eps", 1e-6)
    dtype, device = options.get("params_dtype"), options.get("device")
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(channels, eps)
    if kind == "RMSNorm":
        return RMSNorm(channels, eps, is_split, params_dtype=dtype, device=device)
    if kind == "LayerNorm":
        return LayerNorm(channels, eps, is_split, params_dtype=dtype, device=device)
    raise ValueError(f"qk_norm_type is {kind!r}, not None, 'L2Normalization', 'RMSNorm' or 'LayerNorm'")
