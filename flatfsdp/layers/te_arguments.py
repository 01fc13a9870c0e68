"""Maps Transformer Engine's arguments of constructors and forwards to ours.

In:   the arguments that a program written for Transformer Engine passes.
Out:  keyword arguments of our constructors and forwards.

Positional arguments follow Transformer Engine's order (version 2.x).  An argument that we do not have is
accepted if its value changes nothing, and otherwise refused by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class _Neutral(NamedTuple):
    """Values with which an unsupported argument changes nothing.

    Attributes:
        values: the neutral values; empty means any value.
        instead: advice for other values.
    """

    values: tuple[Any, ...] = ()
    instead: str = "leave it out"

    def accepts(self, value: Any) -> bool:
        """Whether passing this value equals leaving the argument out."""
        if not self.values:
            return True
        if isinstance(value, dist.ProcessGroup):
            # A group of one rank shares nothing.
            return None in self.values and value.size() == 1
        return any(value is each or value == each for each in self.values)


_ANY = _Neutral()
_NONE = _Neutral((None,))
_FALSE = _Neutral((False,))
_OVERLAPS = "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad"

_NEUTRAL: Mapping[str, _Neutral] = {
    **dict.fromkeys(
        ("ub_tp_comm_overlap", *_OVERLAPS.split()),
        _Neutral((False,), "use tp_overlap=True, which needs no buffers of its own, or leave it out"),
    ),
    **dict.fromkeys(("save_original_input", "return_max_logit"), _FALSE),
    **dict.fromkeys(("symmetric_ar_type", "activation_params", "bottom_right_diagonal"), _NONE),
    **dict.fromkeys(("seq_len_interpolation_factor", "pretrained_max_position_embeddings"), _NONE),
    "return_layernorm_output_gathered": _Neutral((False,), "gather it, or leave sequence parallelism out"),
    "cp_group": _Neutral((None,), "context parallelism is not supported: leave it out"),
    "attention_type": _Neutral(("self",)),
    "softmax_type": _Neutral(("vanilla",)),
    "rotary_percent": _Neutral((1.0,)),
}
"""Arguments of constructors that we do not have, and whose value may matter."""

_PARALLEL = "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker"
_SIGNATURES = {
    "Linear": (
        f"in_features out_features {_PARALLEL} rng_tracker_name? init_method bias return_bias params_dtype "
        f"parallel_mode parameters_split device * name? ub_name? {_OVERLAPS} symmetric_ar_type "
        "save_original_input"
    ),
    "LayerNormLinear": (
        f"in_features out_features eps {_PARALLEL} init_method bias normalization return_bias params_dtype "
        "parallel_mode return_layernorm_output return_layernorm_output_gathered parameters_split "
        f"zero_centered_gamma device * name? ub_name? rng_tracker_name? {_OVERLAPS} symmetric_ar_type"
    ),
    "LayerNormMLP": (
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group "
        "tp_size init_method bias normalization activation activation_params output_layer_init_method "
        "fuse_wgrad_accumulation params_dtype return_layernorm_output return_layernorm_output_gathered "
        "seq_length? micro_batch_size? set_parallel_mode zero_centered_gamma device * name? ub_name? "
        f"rng_tracker_name? {_OVERLAPS} symmetric_ar_type"
    ),
    "DotProductAttention": (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type "
        "window_size bottom_right_diagonal sequence_parallel tp_size get_rng_state_tracker tp_group "
        "layer_number attention_type cp_group cp_global_ranks? cp_stream? cp_comm_type? softmax_scale "
        "softmax_type * name? return_max_logit"
    ),
    "MultiheadAttention": (
        "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon init_method "
        "output_layer_init_method layer_number attn_mask_type window_size bottom_right_diagonal tp_group "
        "tp_size num_gqa_groups fuse_wgrad_accumulation get_rng_state_tracker sequence_parallel params_dtype "
        f"return_bias * name? softmax_type {_OVERLAPS} seq_length? micro_batch_size?"
    ),
    # The ub_ options of the layers inside have no effect unless ub_tp_comm_overlap is True, and those of
    # enc_dec_ concern decoder layers.
    "TransformerLayer": (
        "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon hidden_dropout "
        "attention_dropout init_method output_layer_init_method layer_number kv_channels self_attn_mask_type "
        "window_size bottom_right_diagonal enc_dec_attn_mask_type? enc_dec_bottom_right_diagonal? "
        "enc_dec_window_size? tp_group tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation "
        "seq_length? micro_batch_size? sequence_parallel * name? softmax_type activation_params "
        f"ub_tp_comm_overlap {_OVERLAPS.replace(' ', '? ')}?"
    ),
    "RotaryPositionEmbedding": (
        "dim rotary_percent seq_len_interpolation_factor pretrained_max_position_embeddings rotary_base "
        "interleaved"
    ),
}
"""Transformer Engine's constructors: positional arguments in order, then others that we do not have.

A question mark follows an argument that we do not have and whose value never matters.
"""

_NO_BIAS = "pass what is to be masked out as attention_mask"
_PACKED = "documents of several lengths in one row are not supported: pass an attention_mask, or pad"
_OF_CALLS = {
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
        _Neutral((None,), _PACKED),
    ),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "fast_zero_fill"), _ANY),
    "pad_between_seqs": _Neutral((None, False), _PACKED),
    "core_attention_bias_type": _Neutral(("no_bias",), _NO_BIAS),
    "core_attention_bias": _Neutral((None,), _NO_BIAS),
    "alibi_slopes": _Neutral((None,), _NO_BIAS),
    "bottom_right_diagonal": _NONE,
    "inference_params": _Neutral((None,), "there is no cache of keys and values"),
}

_OF_ONE_CALL: Mapping[str, Mapping[str, _Neutral]] = {
    "DotProductAttention": {
        # No value equals the object, so every one is refused, with our word for it.
        **{f"{name}_layer": _Neutral((object(),), f"it is {name}=") for name in ("query", "key", "value")},
        "qkv_format": _Neutral((None,), "pass it to the constructor"),
        "fp8_output": _FALSE,
        "num_splits": _Neutral((None, 1)),
    },
    "MultiheadAttention": {"encoder_output": _Neutral((None,), "cross-attention is not supported")},
    "TransformerLayer": {
        "encoder_output": _Neutral((None,), "decoder layers are not supported"),
        **dict.fromkeys(("enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size"), _ANY),
        "enc_dec_bottom_right_diagonal": _ANY,
    },
}
"""Arguments of forwards that we do not have: those of all attention, and of one class."""


def takes_te_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Decorates a layer's constructor to accept the arguments of Transformer Engine's layer of this name.

    Raises:
        TypeError: if it is called with too many positional arguments, or with one of them twice.
        ValueError: if an argument that we do not have is passed with a value that would change something.
    """
    layer = init.__qualname__.split(".")[0]
    positional, _, by_name = _SIGNATURES[layer].partition("*")
    order = positional.replace("?", "").split()
    names = [*positional.split(), *by_name.split()]
    neutral = {name: _NEUTRAL[name] for name in names if name in _NEUTRAL}
    neutral.update((name[:-1], _ANY) for name in names if name.endswith("?"))

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(order):
            raise TypeError(f"{layer}() takes at most {len(order)} positional arguments, not {len(args)}")
        for name, value in zip(order, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{layer}() got multiple values for argument {name!r}")
            kwargs[name] = value
        init(self, **_ours(layer, neutral, kwargs))

    construct.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return construct  # type: ignore[return-value]


def takes_te_call_arguments(forward: Callable[P, R]) -> Callable[P, R]:
    """Decorates a layer's forward to accept Transformer Engine's keyword arguments.

    Raises:
        ValueError: if an argument that we do not have is passed with a value that would change something.
    """
    layer = forward.__qualname__.split(".")[0]
    neutral = {**_OF_CALLS, **_OF_ONE_CALL[layer]}

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return forward(*args, **_ours(f"{layer}.forward", neutral, kwargs))

    return call


def _ours(what: str, neutral: Mapping[str, _Neutral], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that we have.

    Raises:
        ValueError: for another one, if its value would change something.
    """
    theirs = neutral.keys() & kwargs.keys()
    # Almost every forward has none, and a copy of the arguments would cost host time in each.
    if not theirs:
        return kwargs
    for name in theirs:
        value = kwargs[name]
        if not neutral[name].accepts(value):
            shown = "..." if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{what}: {name}={shown} is a Transformer Engine option that is not supported; "
                f"{neutral[name].instead}"
            )
    return {name: value for name, value in kwargs.items() if name not in theirs}
