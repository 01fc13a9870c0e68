"""`TransformerLayer`: attention and an MLP, each with a norm before it and a residual around it.

In:   [seq, batch, hidden] ("sbhd"), or [batch, seq, hidden] ("bshd");  out: the same shape.

    h   = x + dropout(self_attention(norm(x)))
    out = h + dropout(layernorm_mlp(h))

The gradients of x and h that bypass the norms are added in the norms' backward kernels.  Without dropout, the
second norm's forward kernel computes h.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.layers.attention.masks import Window
from flatfsdp.layers.attention.multihead import MultiheadAttention, Tables
from flatfsdp.layers.calls import autocast_dtype
from flatfsdp.layers.dropout import OwnNumbers, bias_dropout_add
from flatfsdp.layers.layer_options import AttentionOptions, BlockOptions, only, parallel_of
from flatfsdp.layers.layernorm_mlp import LayerNormMLP
from flatfsdp.layers.norm import LayerNorm, RMSNorm
from flatfsdp.layers.shared import InitMethod, Shared
from flatfsdp.layers.te_arguments import takes_te_arguments, takes_te_call_arguments


class TransformerLayer(Shared):
    """One layer of a GPT, with Transformer Engine's arguments and parameter names.

    Args:
        hidden_size: size of input and output.
        ffn_hidden_size: size between the MLP's two linear maps.
        num_attention_heads: heads of the query.
        num_gqa_groups: heads of key and value; default: `num_attention_heads`.
        layernorm_epsilon: epsilon of all norms.
        hidden_dropout: dropout of both branches before they are added to their residuals.
        attention_dropout: probability of dropping an attention weight in training.
        init_method: fills the first weight of each branch.
        output_layer_init_method: fills the second weight of each branch.
        kv_channels: elements of a head; default: hidden_size / num_attention_heads.
        self_attn_mask_type: "causal", "no_mask", "padding", "padding_causal" or "arbitrary".
        window_size: (left, right): query i sees keys i - left to i + right only; -1 means no limit.
        apply_residual_connection_post_layernorm: the residuals are the norms' results, not their inputs.
        output_layernorm: no norm before attention, but one at the end.
        parallel_attention_mlp: out = x + dropout(self_attention(norm(x)) + layernorm_mlp(x)).
        activation: of the MLP, a name in `flatfsdp.kernels.activation.NAMES`.
        attn_input_format: "sbhd" ([seq, batch, hidden]) or "bshd" ([batch, seq, hidden]).
        options: options of all inner layers, listed in `AttentionOptions`.

    Attributes:
        self_attention: the `MultiheadAttention`.
        layernorm_mlp: the `LayerNormMLP`.
        layernorm: the final norm with `output_layernorm`.

    Raises:
        ValueError: if options contradict each other, or a size does not divide evenly over the ranks.
    """

    @takes_te_arguments
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        activation: str = "gelu",
        attn_input_format: str = "sbhd",
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        self._parallel = parallel_of("TransformerLayer", AttentionOptions, options)
        if not 0 <= hidden_dropout < 1:
            raise ValueError(f"hidden_dropout is {hidden_dropout}; it must be 0 <= p < 1")
        if parallel_attention_mlp and (apply_residual_connection_post_layernorm or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp goes neither with apply_residual_connection_post_layernorm nor with "
                "output_layernorm"
            )
        self.hidden_dropout = hidden_dropout
        self._numbers = OwnNumbers(options.get("get_rng_state_tracker"), self._parallel.ranks)
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        # Without dropout the GEMM adds the bias, and the cast of dy sums its gradient.
        return_bias = hidden_dropout > 0 and not parallel_attention_mlp
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            init_method,
            output_layer_init_method,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            num_gqa_groups=num_gqa_groups,
            return_bias=return_bias,
            return_layernorm_output=apply_residual_connection_post_layernorm and not output_layernorm,
            input_layernorm=not output_layernorm,
            qkv_format=attn_input_format,
            **options,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            return_bias=return_bias,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            **only(BlockOptions, options),
        )
        if output_layernorm:
            norm = RMSNorm if options.get("normalization") == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size,
                layernorm_epsilon,
                self._parallel.sequence_parallel,
                options.get("params_dtype"),
                options.get("zero_centered_gamma", False),
                options.get("device"),
            )

    @takes_te_call_arguments
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tables | None = None,
    ) -> Tensor:
        """Runs the layer: [seq, batch, hidden_size], or batch first, to the same shape.

        Under torch.autocast the residuals and the result have autocast's dtype.

        Args:
            hidden_states: [seq, batch, hidden_size], or batch first; with `sequence_parallel` this rank's
                part.
            attention_mask: bool, True where a key is masked out; for padding and "arbitrary" mask types.
            self_attn_mask_type: overrides the constructor's for this call.
            window_size: overrides the constructor's for this call.
            is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts
                every time.
            checkpoint_core_attention: save only query, key and value, and recompute attention in backward.
            rotary_pos_emb: tables of `RotaryPositionEmbedding`, or (cos, sin), FP32 [at least seq, n].

        Raises:
            ValueError: if a shape, mask or option does not fit, or a size does not suit FP8.
            TypeError: if a dtype does not fit, or `rotary_pos_emb` is a single tensor.
            RuntimeError: if the device has no FP8, or no usable cast of a weight is kept.
        """
        if (cast_to := autocast_dtype(hidden_states.device.type)) is not None:
            hidden_states = hidden_states.to(cast_to)
        returns_norm = self.self_attention.return_layernorm_output
        branch = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            rotary_pos_emb=rotary_pos_emb,
            return_residual=not (returns_norm or self.parallel_attention_mlp),
        )
        if self.parallel_attention_mlp:
            out, residual = self.layernorm_mlp(hidden_states, is_first_microbatch, return_residual=True)
            return self._add(branch + out, residual)
        # With nothing between the branch and its residual, the next norm's kernel adds them as it reads them.
        norm_adds = self.hidden_dropout == 0 and not self.self_attention.return_bias
        between, residual = branch if norm_adds else (self._add(*branch), None)
        out = self._add(
            *self.layernorm_mlp(
                between,
                is_first_microbatch,
                residual=residual,
                return_residual=not self.layernorm_mlp.return_layernorm_output,
            )
        )
        return self.layernorm(out) if self.output_layernorm else out

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward deferred (`delay_wgrad_compute`).

        Raises:
            RuntimeError: if no backward has deferred any.
        """
        self.layernorm_mlp.backward_dw()
        self.self_attention.backward_dw()

    def _add(self, out: Tensor, *bias_and_residual: Tensor | None) -> Tensor:
        """Computes residual + dropout(out + bias); the bias may be missing, or None."""
        *bias, residual = bias_and_residual
        drops = self.training and self.hidden_dropout > 0
        # With sequence_parallel ranks have other tokens, and drop other elements.  Otherwise all have the
        # same tensor, and must drop the same.
        with self._numbers.drawn(drops and self._parallel.sequence_parallel):
            return bias_dropout_add(
                out, bias[0] if bias else None, residual, self.hidden_dropout, self.training
            )
