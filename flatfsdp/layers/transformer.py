"""`TransformerLayer`: attention and a two-layer perceptron, with a norm before and a residual around each.

In:   [seq, batch, hidden] ("sbhd"), or [batch, seq, hidden] ("bshd");  out: the same shape.

    h   = x + dropout(self_attention(norm(x)))
    out = h + dropout(layernorm_mlp(h))

The gradients of x and h that bypass the norms are added in the norms' backward kernels.  Without dropout the
second norm's forward kernel computes h.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.rng import GetTracker
from flatfsdp.contract.tensor_parallel import TensorParallel
from flatfsdp.layers.attention.masks import Window
from flatfsdp.layers.attention.multihead import MultiheadAttention, Tables
from flatfsdp.layers.dropout import OwnNumbers, bias_dropout_add
from flatfsdp.layers.layernorm_mlp import LayerNormMLP
from flatfsdp.layers.norm import LayerNorm, RMSNorm
from flatfsdp.layers.parameters import InitMethod
from flatfsdp.layers.shared import Shared
from flatfsdp.matmul.linear_map import FuseWgrad


class TransformerLayer(Shared):
    """One layer of a GPT, with Transformer Engine's arguments and parameter names.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size, activation: of the perceptron; see `LayerNormMLP`.
        hidden_dropout: of what both branches add to their residual.
        layernorm_epsilon, normalization, zero_centered_gamma: of all norms.
        init_method, output_layer_init_method: fill the first and the second weight of each branch.
        self_attn_mask_type, attn_input_format: attn_mask_type and qkv_format of `DotProductAttention`.
        apply_residual_connection_post_layernorm: the residuals are the norms' results, not their inputs.
        output_layernorm: no norm before attention, but one at the end.
        parallel_attention_mlp: out = x + dropout(self_attention(norm(x)) + layernorm_mlp(x)).
        bias: whether the linear maps have one.
        num_attention_heads, num_gqa_groups, attention_dropout, layer_number, kv_channels, window_size,
            fuse_qkv_params, qkv_weight_interleaved, rotary_pos_interleaved, rotary_base, qk_norm_type,
            qk_norm_eps, qk_norm_before_rope: as `MultiheadAttention`.
        fuse_wgrad_accumulation, delay_wgrad_compute, params_dtype, device: as `Linear`, of all parts.
        layer_type, drop_path_rate: only "encoder", which includes GPTs, and 0.
        set_parallel_mode, tp_group, tp_size, sequence_parallel, tp_overlap, get_rng_state_tracker: as
            `MultiheadAttention`, of all parts.  Under sequence_parallel each rank draws the dropout of its
            part of the sequence.

    Attributes:
        self_attention: a MultiheadAttention.
        layernorm_mlp: a LayerNormMLP.
        layernorm: the norm at the end with `output_layernorm`.

    Raises:
        ValueError: if options contradict each other, or ranks cannot share a size equally.
    """

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
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        *,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        rotary_base: float | None = None,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        fuse_wgrad_accumulation: FuseWgrad = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_overlap: bool = False,
        get_rng_state_tracker: GetTracker | None = None,
    ) -> None:
        super().__init__()
        parallel = TensorParallel.of("TransformerLayer", tp_group, tp_size, sequence_parallel)
        self._parallel = parallel
        if layer_type != "encoder":
            raise ValueError(
                f"layer_type is {layer_type!r}; there is no cross-attention, so it must be 'encoder'"
            )
        if drop_path_rate != 0:
            raise ValueError(
                f"drop_path_rate is {drop_path_rate}; dropping whole paths is not offered: pass 0"
            )
        if not 0 <= hidden_dropout < 1:
            raise ValueError(f"hidden_dropout is {hidden_dropout}; it must be 0 <= p < 1")
        if parallel_attention_mlp and (apply_residual_connection_post_layernorm or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp goes neither with apply_residual_connection_post_layernorm nor with "
                "output_layernorm"
            )
        self.hidden_dropout = hidden_dropout
        self._splits_sequence = parallel.sequence_parallel
        self._numbers = OwnNumbers(get_rng_state_tracker, parallel.ranks)
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        # Without dropout the product adds the bias, and its gradient comes with the cast of dy.
        return_bias = hidden_dropout > 0 and not parallel_attention_mlp
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            init_method,
            output_layer_init_method,
            layer_number,
            self_attn_mask_type,
            window_size,
            num_gqa_groups=num_gqa_groups,
            return_bias=return_bias,
            return_layernorm_output=apply_residual_connection_post_layernorm and not output_layernorm,
            input_layernorm=not output_layernorm,
            fuse_qkv_params=fuse_qkv_params,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            rotary_base=rotary_base,
            bias=bias,
            normalization=normalization,
            qkv_format=attn_input_format,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            params_dtype=params_dtype,
            device=device,
            set_parallel_mode=set_parallel_mode,
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            tp_overlap=tp_overlap,
            get_rng_state_tracker=get_rng_state_tracker,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            bias=bias,
            normalization=normalization,
            activation=activation,
            zero_centered_gamma=zero_centered_gamma,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            return_bias=return_bias,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            params_dtype=params_dtype,
            device=device,
            set_parallel_mode=set_parallel_mode,
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            tp_overlap=tp_overlap,
        )
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size,
                layernorm_epsilon,
                parallel.sequence_parallel,
                params_dtype,
                zero_centered_gamma,
                device,
            )

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
        """[seq, batch, hidden_size], or batch first, to the same shape; arguments as `MultiheadAttention`.

        Under torch.autocast the residuals are in its dtype, too, and so is the result.

        Raises:
            ValueError, TypeError, RuntimeError: as `MultiheadAttention`.
        """
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
        arguments: dict[str, Any] = {
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "rotary_pos_emb": rotary_pos_emb,
        }
        if self.parallel_attention_mlp:
            attended = self.self_attention(hidden_states, attention_mask, **arguments)
            out, residual = self.layernorm_mlp(hidden_states, is_first_microbatch, return_residual=True)
            return self._add(attended + out, residual)
        branch = self.self_attention(
            hidden_states,
            attention_mask,
            return_residual=not self.self_attention.return_layernorm_output,
            **arguments,
        )
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
        """Computes the weight gradients that the oldest backward has left; see `delay_wgrad_compute`.

        Raises:
            RuntimeError: if no backward has left any.
        """
        self.layernorm_mlp.backward_dw()
        self.self_attention.backward_dw()

    def _add(self, out: Tensor, *bias_and_residual: Tensor | None) -> Tensor:
        """Residual + dropout(out + bias); the bias may be missing, or None."""
        *bias, residual = bias_and_residual
        with self._numbers.drawn(self._splits_sequence and self.training and self.hidden_dropout > 0):
            return bias_dropout_add(
                out, bias[0] if bias else None, residual, self.hidden_dropout, self.training
            )
