"""Options that layers pass on: known ones reach the layers inside, unknown ones are errors."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.layers import (
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

LAYERS: dict[str, tuple[Callable[..., nn.Module], type]] = {
    "Linear": (partial(Linear, 16, 16), LinearOptions),
    "LayerNormLinear": (partial(LayerNormLinear, 16, 16), LinearOptions),
    "LayerNormMLP": (partial(LayerNormMLP, 16, 32), BlockOptions),
    "MultiheadAttention": (partial(MultiheadAttention, 16, 2), AttentionOptions),
    "TransformerLayer": (partial(TransformerLayer, 16, 32, 2), AttentionOptions),
}

DEFAULTS: dict[str, Any] = {
    "bias": True,
    "delay_wgrad_compute": False,
    "device": None,
    "fuse_qkv_params": False,
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "init_method": None,
    "normalization": "LayerNorm",
    "parallel_mode": None,
    "parameters_split": None,
    "params_dtype": None,
    "partition_sizes": None,
    "qk_norm_before_rope": False,
    "qk_norm_eps": 1e-6,
    "qk_norm_type": None,
    "qkv_weight_interleaved": True,
    "return_bias": False,
    "rotary_base": None,
    "rotary_pos_interleaved": False,
    "sequence_parallel": False,
    "set_parallel_mode": False,
    "tp_group": None,
    "tp_overlap": False,
    "tp_size": 1,
    "zero_centered_gamma": False,
}


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_options_are_type_errors(name: str) -> None:
    make, _ = LAYERS[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tp_sizes'"):
        make(tp_sizes=2)


@pytest.mark.parametrize("name", LAYERS)
def test_every_option_is_taken_and_may_be_left_out(name: str) -> None:
    make, options = LAYERS[name]
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
    make, _ = LAYERS[name]
    layer = make(
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
