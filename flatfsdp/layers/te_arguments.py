"""Maps Transformer Engine's arguments of constructors and forwards to ours.

In:   the arguments that a program written for Transformer Engine passes.
Out:  keyword arguments of our constructors and forwards.

Positional arguments follow Transformer Engine's order (version 2.x).  An argument that we do not have is
accepted if it is None, False or Transformer Engine's default, and otherwise refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_PARALLEL = "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker"
_ORDERS = {
    "Linear": (
        f"in_features out_features {_PARALLEL} rng_tracker_name init_method bias return_bias params_dtype "
        "parallel_mode parameters_split device"
    ),
    "LayerNormLinear": (
        f"in_features out_features eps {_PARALLEL} init_method bias normalization return_bias params_dtype "
        "parallel_mode return_layernorm_output return_layernorm_output_gathered parameters_split "
        "zero_centered_gamma device"
    ),
    "LayerNormMLP": (
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group "
        "tp_size init_method bias normalization activation activation_params output_layer_init_method "
        "fuse_wgrad_accumulation params_dtype return_layernorm_output return_layernorm_output_gathered "
        "seq_length micro_batch_size set_parallel_mode zero_centered_gamma device"
    ),
    "DotProductAttention": (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type "
        "window_size bottom_right_diagonal sequence_parallel tp_size get_rng_state_tracker tp_group "
        "layer_number attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale "
        "softmax_type"
    ),
    "MultiheadAttention": (
        "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon init_method "
        "output_layer_init_method layer_number attn_mask_type window_size bottom_right_diagonal tp_group "
        "tp_size num_gqa_groups fuse_wgrad_accumulation get_rng_state_tracker sequence_parallel params_dtype "
        "return_bias"
    ),
    "TransformerLayer": (
        "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon hidden_dropout "
        "attention_dropout init_method output_layer_init_method layer_number kv_channels self_attn_mask_type "
        "window_size bottom_right_diagonal enc_dec_attn_mask_type enc_dec_bottom_right_diagonal "
        "enc_dec_window_size tp_group tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation "
        "seq_length micro_batch_size sequence_parallel"
    ),
    "RotaryPositionEmbedding": (
        "dim rotary_percent seq_len_interpolation_factor pretrained_max_position_embeddings rotary_base "
        "interleaved"
    ),
}
"""Positional arguments of Transformer Engine's constructors, in order."""


def _each(names: str, instead: str = "leave it out") -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


_IGNORED = _each(
    "name layer_number ub_name rng_tracker_name seq_length micro_batch_size cp_global_ranks cp_stream "
    "cp_comm_type enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_bottom_right_diagonal "
    "enc_dec_window_size max_seqlen_q max_seqlen_kv fast_zero_fill"
)
"""Arguments that we do not have, and whose value never matters."""

_OVERLAPS = _each(
    "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad",
    "use tp_overlap=True, which needs no buffers of its own, or leave it out",
)

_DEFAULTS: Mapping[str, object] = {
    "attention_type": "self",
    "layer_type": "encoder",
    "softmax_type": "vanilla",
    "core_attention_bias_type": "no_bias",
    "rotary_percent": 1.0,
    "drop_path_rate": 0.0,
    "num_splits": 1,
}
"""Transformer Engine's defaults other than None and False, of arguments that we do not have."""

_INSTEAD: Mapping[str, str] = {
    **_IGNORED,
    **_each("attention_type layer_type softmax_type rotary_percent num_splits save_original_input"),
    **_each("return_max_logit symmetric_ar_type activation_params bottom_right_diagonal drop_path_rate"),
    **_each("fp8_output seq_len_interpolation_factor pretrained_max_position_embeddings"),
    **_OVERLAPS,
    "ub_tp_comm_overlap": _OVERLAPS["ub_overlap_ag"],
    "return_layernorm_output_gathered": "gather it, or leave sequence parallelism out",
    "cp_group": "context parallelism is not supported: leave it out",
    "encoder_output": "cross-attention and decoder layers are not supported",
    "inference_params": "there is no cache of keys and values",
    **_each(
        "cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded pad_between_seqs",
        "documents of several lengths in one row are not supported: pass an attention_mask, or pad",
    ),
    **_each("core_attention_bias core_attention_bias_type alibi_slopes", "pass an attention_mask"),
    **{f"{name}_layer": f"it is {name}=" for name in ("query", "key", "value")},
}
"""All arguments that we do not have, with advice for values that would change something."""


def takes_te_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Decorates a layer's constructor to accept the arguments of Transformer Engine's layer of this name.

    Raises:
        TypeError: if it is called with too many positional arguments, or with one of them twice.
        ValueError: if an argument that we do not have is passed with a value that would change something.
    """
    layer = init.__qualname__.split(".")[0]
    order = _ORDERS[layer].split()

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(order):
            raise TypeError(f"{layer}() takes at most {len(order)} positional arguments, not {len(args)}")
        for name, value in zip(order, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{layer}() got multiple values for argument {name!r}")
            kwargs[name] = value
        init(self, **_ours(layer, kwargs))

    return construct  # type: ignore[return-value]


def takes_te_call_arguments(forward: Callable[P, R]) -> Callable[P, R]:
    """Decorates a layer's forward to accept Transformer Engine's keyword arguments.

    Raises:
        ValueError: if an argument that we do not have is passed with a value that would change something.
    """
    layer = forward.__qualname__.split(".")[0]

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "qkv_format" in kwargs and kwargs.pop("qkv_format") is not None:
            # Not in the table, as the constructor has it.
            raise ValueError(f"{layer}.forward: pass qkv_format to the constructor")
        return forward(*args, **_ours(f"{layer}.forward", kwargs))

    return call


def _ours(what: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that we have.

    Raises:
        ValueError: for another one, if its value would change something.
    """
    theirs = _INSTEAD.keys() & kwargs.keys()
    # Almost every forward has none, and a copy of the arguments would cost host time in each.
    if not theirs:
        return kwargs
    # The layers inside of a TransformerLayer would read these only where ub_tp_comm_overlap is True.
    ignored = _IGNORED.keys() | (_OVERLAPS.keys() if what == "TransformerLayer" else set())
    for name in theirs - ignored:
        value = kwargs[name]
        if _changes(value, _DEFAULTS.get(name)):
            shown = "..." if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{what}: {name}={shown} is a Transformer Engine option that is not supported; "
                f"{_INSTEAD[name]}"
            )
    return {name: value for name, value in kwargs.items() if name not in theirs}


def _changes(value: Any, default: Any) -> bool:
    """Whether passing this value differs from leaving the argument out."""
    if isinstance(value, dist.ProcessGroup):
        # A group of one rank shares nothing.
        return value.size() > 1
    if isinstance(value, Tensor):
        # `==` would compare its elements.
        return True
    # Not by `==`, which takes 0 for False.
    return value is not None and value is not False and value != default
