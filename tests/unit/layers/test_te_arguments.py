"""Programs for Transformer Engine construct our layers: its order, its names, and neutral arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import fp8, layers
from tests.support.assertions import assert_raises

NO_OVERLAP = dict.fromkeys(
    ["ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"], False
)
te: Any = layers
"""The layers without the types of our own signatures, as in a program for Transformer Engine."""


def fill(weight: torch.Tensor) -> None:
    nn.init.constant_(weight, 0.5)


def test_positional_arguments_have_transformer_engines_order() -> None:
    layer = te.Linear(32, 48, False, False, None, 1, None, None, fill, False, True, torch.bfloat16)
    assert layer.bias is None and layer.return_bias and layer.weight.dtype == torch.bfloat16
    assert bool((layer.weight == 0.5).all())
    assert te.Linear(32, 32, False).bias is not None, "the third one is sequence_parallel"
    norm = te.LayerNormLinear(32, 48, 1e-6, False, False, None, 1, None, fill, False, "RMSNorm")
    assert norm.bias is None and norm.layer_norm_bias is None
    assert te.LayerNormMLP(32, 64, 1e-6, False, True).return_bias
    attention = te.DotProductAttention(4, 8, 2, 0.0, "bshd", "no_mask", None, None, False, 1, None, None, 3)
    assert attention(*(torch.randn(2, 5, heads, 8) for heads in (4, 2, 2))).shape == (2, 5, 32)
    of_layer = (32, 64, 4, 2, 1e-6, 0.0, 0.0, fill, fill, 1, None, "causal", None, None, "no_mask")
    assert te.TransformerLayer(*of_layer)(torch.randn(5, 2, 32)).shape == (5, 2, 32)
    rotary = te.RotaryPositionEmbedding(8, 1.0, None, None, 500.0, True)
    assert rotary.rotary_base == 500.0 and rotary.interleaved


@pytest.mark.parametrize(
    ("layer", "sizes", "neutral"),
    [
        ("Linear", (32, 32), {"save_original_input": False, "rng_tracker_name": "a", "ub_name": "qkv"}),
        ("LayerNormLinear", (32, 32), {"return_layernorm_output_gathered": False, "symmetric_ar_type": None}),
        ("LayerNormMLP", (32, 64), {"seq_length": 8, "micro_batch_size": 2, "activation_params": None}),
        ("DotProductAttention", (4, 8), {"cp_group": None, "cp_comm_type": "p2p", "softmax_type": "vanilla"}),
        ("MultiheadAttention", (32, 4), {"seq_length": 8, "bottom_right_diagonal": None}),
        (
            "TransformerLayer",
            (32, 64, 4),
            {"ub_tp_comm_overlap": False, "enc_dec_attn_mask_type": "padding", "micro_batch_size": 2},
        ),
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(
    layer: str, sizes: tuple[int, ...], neutral: dict[str, Any]
) -> None:
    overlap = {} if layer == "DotProductAttention" else NO_OVERLAP
    made, plain = (
        getattr(te, layer)(*sizes, name="decoder.0", **neutral, **overlap),
        getattr(te, layer)(*sizes),
    )
    shapes = [[(name, p.shape) for name, p in each.named_parameters()] for each in (made, plain)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("layer", "sizes", "options", "message"),
    [
        ("Linear", (32, 32), {"ub_overlap_ag": True}, "Linear: ub_overlap_ag=True .* use tp_overlap=True"),
        (
            "Linear",
            (32, 32),
            {"symmetric_ar_type": "multimem"},
            "symmetric_ar_type='multimem' is a Transformer",
        ),
        ("TransformerLayer", (32, 64, 4), {"ub_tp_comm_overlap": True}, "ub_tp_comm_overlap=True"),
        ("DotProductAttention", (4, 8), {"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ("MultiheadAttention", (32, 4), {"bottom_right_diagonal": True}, "bottom_right_diagonal=True"),
        ("RotaryPositionEmbedding", (8,), {"rotary_percent": 0.5}, r"rotary_percent=0\.5"),
    ],
    ids=str,
)
def test_what_would_change_something_is_refused_by_name(
    layer: str, sizes: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(te, layer)(*sizes, **options)


HEADS = (torch.ones(2, 1, 4, 8),) * 3
HIDDEN = (torch.ones(2, 1, 32),)
CALLS: dict[str, tuple[Any, Any]] = {
    "DotProductAttention": ((4, 8), HEADS),
    "MultiheadAttention": ((32, 4), HIDDEN),
    "TransformerLayer": ((32, 64, 4), HIDDEN),
}


@pytest.mark.parametrize("layer", CALLS)
def test_a_call_takes_what_changes_nothing(layer: str) -> None:
    sizes, inputs = CALLS[layer]
    made = getattr(te, layer)(*sizes).eval()
    neutral = {
        "cu_seqlens_q": None,
        "cu_seqlens_kv": None,
        "max_seqlen_q": 2,
        "core_attention_bias_type": "no_bias",
        "core_attention_bias": None,
        "fast_zero_fill": True,
        "inference_params": None,
    }
    assert torch.equal(made(*inputs, **neutral), made(*inputs))


@pytest.mark.parametrize("layer", CALLS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens_q", torch.tensor([0, 2]), r"cu_seqlens_q=\.\.\. is .*documents of several lengths"),
        ("core_attention_bias_type", "alibi", "core_attention_bias_type='alibi' is .*attention_mask"),
        ("inference_params", object(), "there is no cache of keys and values"),
    ],
)
def test_a_call_refuses_what_would_change_something(layer: str, name: str, value: Any, message: str) -> None:
    sizes, inputs = CALLS[layer]
    made = getattr(te, layer)(*sizes)
    assert_raises(ValueError, rf"^{layer}\.forward: .*{message}", made, *inputs, **{name: value})
    assert_raises(TypeError, f"unexpected keyword argument '{name}s'", made, *inputs, **{f"{name}s": None})


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_call_names_our_word(name: str) -> None:
    attention = te.DotProductAttention(4, 8)
    tensors = dict(zip(("query", "key", "value"), HEADS, strict=True))
    tensors[f"{name}_layer"] = tensors.pop(name)
    with pytest.raises(ValueError, match=rf"DotProductAttention\.forward: {name}_layer=.* it is {name}=$"):
        attention(**tensors)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "CurrentScaling", "BlockScaling"])
def test_a_recipe_names_our_word(recipe: str) -> None:
    with pytest.raises(TypeError, match=rf"^{recipe} has no fp8_dpa=: leave it out: attention is"):
        getattr(fp8, recipe)(fp8_dpa=True)
    assert_raises(TypeError, "unexpected keyword argument 'fp8_dp'", getattr(fp8, recipe), fp8_dp=True)


def test_python_says_what_is_wrong_with_the_call() -> None:
    assert_raises(TypeError, "multiple values for argument 'in_features'", te.Linear, 32, 32, in_features=32)
    assert_raises(TypeError, "unexpected keyword argument 'biass'", te.Linear, 32, 32, biass=True)
    assert_raises(TypeError, "takes at most 15 positional arguments, not 16", te.Linear, *range(16))


def test_layers_as_megatron_core_constructs_them() -> None:
    """The keyword arguments are those of its wrappers, without tensor parallelism."""
    alone: dict[str, Any] = {"sequence_parallel": False, "tp_size": 1}
    alone |= dict.fromkeys(("tp_group", "get_rng_state_tracker"))
    shared = {**alone, "in_features": 32, "out_features": 64, "parallel_mode": "column", "init_method": fill}
    shared |= dict.fromkeys(("fuse_wgrad_accumulation", "bias", "return_bias", "delay_wgrad_compute"), False)
    shared |= {"params_dtype": torch.float32, "device": "cpu", "ub_name": "qkv", **NO_OVERLAP}
    linear = te.Linear(rng_tracker_name=None, **shared)
    normed = {"eps": 1e-5, "zero_centered_gamma": False}
    fused = te.LayerNormLinear(normalization="RMSNorm", return_layernorm_output=False, **normed, **shared)
    sizes = {"num_attention_heads": 4, "kv_channels": 8, "num_gqa_groups": 2, "layer_number": 1}
    kinds = {"qkv_format": "sbhd", "attn_mask_type": "causal", "attention_type": "self"}
    kinds |= {"cp_comm_type": "p2p", "softmax_type": "vanilla"}
    absent = dict.fromkeys(("window_size", "cp_group", "cp_global_ranks", "cp_stream", "softmax_scale"))
    attention = te.DotProductAttention(attention_dropout=0.0, **sizes, **kinds, **absent, **alone)
    norm = te.RMSNorm(hidden_size=32, sequence_parallel=False, **normed)
    x = norm(torch.randn(6, 2, 32))
    q, k, v = linear(x).view(6, 2, 8, 8).split([4, 2, 2], dim=2)
    assert attention(q, k, v).shape == (6, 2, 32) and fused(x).shape == (6, 2, 64)


def test_recipes_have_transformer_engines_names() -> None:
    assert fp8.Float8CurrentScaling() == fp8.CurrentScaling()
    assert fp8.Float8BlockScaling() == fp8.BlockScaling()
