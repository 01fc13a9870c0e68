"""Options that layers pass on: known ones reach the layers inside, unknown ones are errors."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.layers import (
    DotProductAttention,
    Embedding,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.layer_options import AttentionOptions, BlockOptions, LinearOptions
from flatfsdp.layers.normalized import NormKind
from tests.support.assertions import assert_equal

MAKES: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(Linear, 32, 48),
    "LayerNormLinear": partial(LayerNormLinear, 32, 48),
    "LayerNormMLP": partial(LayerNormMLP, 32, 48),
    "DotProductAttention": partial(DotProductAttention, 4, 8),
    "MultiheadAttention": partial(MultiheadAttention, hidden_size=32, num_attention_heads=4),
    "TransformerLayer": partial(TransformerLayer, 32, 48, 4),
    "Embedding": partial(Embedding, 3, 2),
    "LayerNorm": partial(LayerNorm, 16),
    "RMSNorm": partial(RMSNorm, 16),
}
OPTIONS = {
    **dict.fromkeys(("Linear", "LayerNormLinear"), LinearOptions),
    "LayerNormMLP": BlockOptions,
    **dict.fromkeys(("MultiheadAttention", "TransformerLayer"), AttentionOptions),
}

NONE = ("device", "get_rng_state_tracker", "init_method", "parallel_mode", "parameters_split", "params_dtype")
NONE += ("partition_sizes", "qk_norm_type", "rotary_base", "tp_group")
OFF = (
    "delay_wgrad_compute",
    "fuse_qkv_params",
    "fuse_wgrad_accumulation",
    "qk_norm_before_rope",
    "return_bias",
)
OFF += (
    "rotary_pos_interleaved",
    "sequence_parallel",
    "set_parallel_mode",
    "tp_overlap",
    "zero_centered_gamma",
)
DEFAULTS: dict[str, Any] = {
    **{"bias": True, "qkv_weight_interleaved": True, "normalization": "LayerNorm", "qk_norm_eps": 1e-6},
    **{"tp_size": 1, **dict.fromkeys(NONE), **dict.fromkeys(OFF, False)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_unknown_options_are_type_errors(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp_sizes'"):
        MAKES[name](tp_sizes=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *(
            (name, options, f"{name}.*{message}")
            for name in ("Linear", "LayerNormLinear")
            for options, message in (
                ({"parallel_mode": "diagonal"}, "parallel_mode"),
                ({"tp_size": -1}, "tp_size is -1"),
                ({"parameters_split": {"q": 16, "k": 16}}, "48"),
                ({"parameters_split": ["a", "b", "c", "d", "e"]}, "48"),
                ({"parameters_split": []}, "parameters_split"),
            )
        ),
        (
            "Linear",
            {"fuse_wgrad_accumulation": "two-pass"},
            "'two-pass', not .* 'two_pass' or 'if_claimed'",
        ),
        ("LayerNormLinear", {"normalization": "BatchNorm"}, "BatchNorm"),
        ("LayerNormMLP", {"activation": "tanh"}, "tanh.*swiglu"),
        ("LayerNormMLP", {"normalization": "BatchNorm"}, "BatchNorm"),
        ("LayerNormMLP", {"tp_size": 0}, "tp_size is 0"),
        ("DotProductAttention", {"num_gqa_groups": 3}, "is 3; it must divide num_attention_heads, 4"),
        ("DotProductAttention", {"qkv_format": "thd"}, "qkv_format is 'thd'"),
        ("DotProductAttention", {"attn_mask_type": "alibi"}, "attn_mask_type is 'alibi'"),
        ("DotProductAttention", {"attention_dropout": 1.0}, r"attention_dropout is 1\.0"),
        ("DotProductAttention", {"window_size": (3, 1)}, r"is \(3, 1\), which shows keys after the query"),
        ("DotProductAttention", {"window_size": (-2, 0)}, r"window_size is \(-2, 0\)"),
        ("DotProductAttention", {"window_size": (4,)}, r"window_size is \(4,\); it must be two numbers"),
        ("DotProductAttention", {"window_size": 4}, "window_size is 4; it must be two numbers"),
        ("MultiheadAttention", {"delay_wgrad_compute": True}, "parameters_split with delay_wgrad_compute"),
        ("MultiheadAttention", {"attention_type": "cross"}, "attention_type='cross' is a Transformer"),
        ("MultiheadAttention", {"return_layernorm_output": True}, "needs input_layernorm=True"),
        ("MultiheadAttention", {"num_attention_heads": 5}, "5 heads do not divide hidden_size 32"),
        ("MultiheadAttention", {"qk_norm_type": "BatchNorm"}, "qk_norm_type is 'BatchNorm'"),
        ("TransformerLayer", {"layer_type": "decoder"}, "layer_type='decoder' is a Transformer"),
        ("TransformerLayer", {"drop_path_rate": 0.1}, r"drop_path_rate=0\.1 is a Transformer"),
        ("TransformerLayer", {"hidden_dropout": 1.0}, r"hidden_dropout is 1\.0"),
        ("TransformerLayer", {"parallel_attention_mlp": True, "output_layernorm": True}, "goes neither"),
        ("TransformerLayer", {"delay_wgrad_compute": True}, "parameters_split with delay_wgrad_compute"),
        ("TransformerLayer", {"attn_input_format": "thd"}, "qkv_format is 'thd'"),
        ("TransformerLayer", {"tp_size": 3, "set_parallel_mode": True}, "which 3 tensor-parallel ranks"),
        ("Embedding", {"padding_idx": 3}, "3 rows"),
        ("Embedding", {"padding_idx": -4}, "3 rows"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MAKES[name](**options)


@pytest.mark.parametrize("options", [{}, {"zero_centered_gamma": True}], ids=["", "zero-centred"])
@pytest.mark.parametrize("name", [name for name in MAKES if name != "DotProductAttention"])
def test_layers_on_the_meta_device_are_initialised_later(name: str, options: dict[str, Any]) -> None:
    options = {} if name in ("Linear", "Embedding") else options
    if name == "TransformerLayer":
        options = {**options, "output_layernorm": True, "qk_norm_type": "RMSNorm"}
    torch.manual_seed(0)
    now, later = MAKES[name](**options), MAKES[name](device="meta", **options)
    assert all(p.is_meta for p in later.parameters())
    later.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in later.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_equal(now.parameters(), later.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_taken_and_may_be_left_out(name: str) -> None:
    make, options = MAKES[name], OPTIONS[name]
    torch.manual_seed(0)
    default = make()
    for option in options.__annotations__:
        torch.manual_seed(0)
        layer = make(**{option: DEFAULTS[option]})
        assert repr(layer) == repr(default), option
        values = layer.state_dict()
        assert values.keys() == default.state_dict().keys(), option
        assert all(torch.equal(values[key], value) for key, value in default.state_dict().items()), option


@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerLayer"])
def test_options_reach_all_layers_inside(name: str) -> None:
    layer = MAKES[name](
        params_dtype=torch.bfloat16,
        device="meta",
        fuse_qkv_params=True,
        fuse_wgrad_accumulation="two_pass",
        bias=False,
        normalization="RMSNorm",
        qk_norm_type="RMSNorm",
    )
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.bfloat16, "meta")}
    assert not [key for key, _ in layer.named_parameters() if key.endswith("bias")]
    maps = [module for module in layer.modules() if isinstance(module, MatmulLayer)]
    assert maps and all(module.fuse_wgrad_accumulation == "two_pass" for module in maps)


def test_defaults_and_order_of_arguments_are_transformer_engines() -> None:
    parameters = inspect.signature(TransformerLayer).parameters
    # Those behind come by name: Transformer Engine's next one is a label that we leave out.
    assert [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD] == [
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_gqa_groups",
        "layernorm_epsilon",
        "hidden_dropout",
        "attention_dropout",
        "init_method",
        "output_layer_init_method",
    ]
    layer = TransformerLayer(16, 32, 2, fuse_qkv_params=True, qk_norm_type="RMSNorm")
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    assert attention.qkv_weight_interleaved and not attention.rotary_pos_interleaved
    assert not attention.qk_norm_before_rope and attention.rotary is None
    assert isinstance(attention.q_norm, RMSNorm) and attention.q_norm.kind.eps == 1e-6
    assert mlp.norm == NormKind(1e-5, rms=False, zero_centered=False)
