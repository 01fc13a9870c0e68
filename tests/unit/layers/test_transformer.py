from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.contract.recipe import DelayedScaling
from flatfsdp.fp8.autocast import autocast
from flatfsdp.fp8.recompute import checkpoint
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding
from flatfsdp.layers.transformer import TransformerLayer
from tests.support import plain_layers as plain
from tests.support.plain_attention import check_sequences, expected_output, trained

SEQ, BATCH, HIDDEN, FFN, HEADS = 8, 2, 32, 48, 4
BOUND = 1e-5
TRIANGLE = plain.window(SEQ, SEQ, -1, 0)


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def expected_layer(
    x: Tensor,
    state: dict[str, Tensor],
    layer: TransformerLayer,
    seen: Tensor | None = TRIANGLE,
    *,
    post_layernorm: bool = False,
    swiglu: bool = False,
    **attention: Any,
) -> Tensor:
    """The expected result for x [batch, seq, hidden], FP64; without dropout."""

    def norm(x: Tensor, prefix: str) -> Tensor:
        weight, bias = state[f"{prefix}weight"], state.get(f"{prefix}bias")
        return plain.norm(x, weight, bias, rms=bias is None)

    def perceptron(x: Tensor) -> Tensor:
        up = x @ state["layernorm_mlp.fc1_weight"].T + state["layernorm_mlp.fc1_bias"]
        if swiglu:
            gate, linear = up.chunk(2, -1)
            up = F.silu(gate) * linear
        else:
            up = F.gelu(up, approximate="tanh")
        return up @ state["layernorm_mlp.fc2_weight"].T + state["layernorm_mlp.fc2_bias"]

    attended = expected_output(layer.self_attention, x, under("self_attention.", state), seen, **attention)
    if layer.parallel_attention_mlp:
        return x + attended + perceptron(norm(x, "layernorm_mlp.layer_norm_"))
    has_norm_output = post_layernorm and not layer.output_layernorm
    residual = norm(x, "self_attention.layernorm_qkv.layer_norm_") if has_norm_output else x
    between = residual + attended
    normed = norm(between, "layernorm_mlp.layer_norm_")
    out = (normed if post_layernorm else between) + perceptron(normed)
    return norm(out, "layernorm.") if layer.output_layernorm else out


def make(**options: Any) -> TransformerLayer:
    return trained(
        TransformerLayer(HIDDEN, FFN, HEADS, **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **options})
    )


def against_plain(layer: TransformerLayer, arguments: dict[str, Any], *args: Any, **expected: Any) -> None:
    dtype = next(layer.parameters()).dtype
    check_sequences(
        layer,
        layer.self_attention.core_attention.qkv_format,
        lambda x, state: expected_layer(x, state, layer, *args, **expected),
        (BATCH, SEQ, HIDDEN),
        BOUND if dtype == torch.float32 else 2 * plain.EPS[dtype],
        **arguments,
    )


GPT: dict[str, Any] = {"fuse_qkv_params": True}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "num_gqa_groups": 2,
    "fuse_qkv_params": True,
    "rotary_base": 100.0,
    "qk_norm_type": "RMSNorm",
}
AS_LLAMA: dict[str, Any] = {"swiglu": True, "base": 100.0, "qk_norm": "RMSNorm"}


@pytest.mark.parametrize("attn_input_format", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"fuse_qkv_params": True, "parallel_attention_mlp": True}, {}),
        ({"output_layernorm": True}, {}),
        ({"apply_residual_connection_post_layernorm": True}, {"post_layernorm": True}),
        (
            {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
            {"post_layernorm": True},
        ),
        (LLAMA, AS_LLAMA),
    ],
    ids=["gpt", "parallel", "output_norm", "post_norm", "post_norm_output_norm", "llama"],
)
def test_layers_against_float64(
    attn_input_format: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    against_plain(make(attn_input_format=attn_input_format, **options), {}, **expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("options", "expected"), [(GPT, {}), (LLAMA, AS_LLAMA)], ids=["gpt", "llama"])
def test_16_bit_layers_against_float64(
    dtype: torch.dtype, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    torch.manual_seed(2)  # others have weights whose gradients nearly cancel, up to 8 times as far off
    against_plain(make(params_dtype=dtype, **options), {}, **expected)


def test_masks_windows_and_tables_are_passed_on() -> None:
    mask = torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool)
    mask[1, ..., 5:] = True
    arguments = {
        "attention_mask": mask,
        "self_attn_mask_type": "padding_causal",
        "window_size": (2, 0),
        "checkpoint_core_attention": True,
        "rotary_pos_emb": RotaryPositionEmbedding(HIDDEN // HEADS, rotary_base=50.0)(SEQ),
    }
    against_plain(make(), arguments, ~mask & plain.window(SEQ, SEQ, 2, 0), base=50.0)
    by_constructor = make(window_size=(2, 0))
    against_plain(by_constructor, {}, plain.window(SEQ, SEQ, 2, 0))


@pytest.mark.parametrize(
    "options", [{}, {"parallel_attention_mlp": True}, {"bias": False}, {"output_layernorm": True}]
)
def test_dropout_of_the_branches(options: dict[str, Any]) -> None:
    """If everything was dropped, the layer passes its input on; otherwise it is the layer without dropout."""
    layer, without = make(hidden_dropout=0.5, **options), make(**options)
    without.load_state_dict(layer.state_dict())
    x = torch.randn(SEQ, BATCH, HIDDEN)
    layer.eval()
    assert plain.error(layer(x), without(x)) < 1e-6
    layer.train()
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    if not options.get("output_layernorm"):
        unchanged = (first == x).float().mean().item()
        assert abs(unchanged - (0.5 if layer.parallel_attention_mlp else 0.25)) < 0.08


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_the_same(use_reentrant: bool) -> None:
    layer, x = make(hidden_dropout=0.3, attention_dropout=0.3), plain.leaf(SEQ, BATCH, HIDDEN)
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        torch.manual_seed(2)
        out = run(x)
        layer.zero_grad()
        x.grad = None
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_under_autocast_residuals_are_16_bit_and_parameters_fp32() -> None:
    layer, x = make(hidden_dropout=0.1).eval(), plain.leaf(SEQ, BATCH, HIDDEN)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16 and plain.error(out, expected) < 0.02
    out.sum().backward()
    assert x.grad is not None and {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def fused_and_not(**options: Any) -> tuple[TransformerLayer, TransformerLayer]:
    plain_layer = make(fuse_qkv_params=True, **options)
    fused = make(fuse_qkv_params=True, fuse_wgrad_accumulation=True, **options)
    fused.load_state_dict(plain_layer.state_dict())
    return plain_layer, fused


def test_weight_gradients_accumulate_in_main_grad() -> None:
    layer, fused = fused_and_not(normalization="RMSNorm", activation="swiglu")
    before = {}
    for name, parameter in fused.named_parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.randn_like(parameter)
            before[name] = parameter.main_grad.clone()
    assert len(before) == 4
    x = plain.leaf(SEQ, BATCH, HIDDEN)
    out = layer(x)
    assert torch.equal(fused(x), out)
    dy = torch.randn_like(out)
    layer(x).backward(dy)
    fused(x).backward(dy)
    unfused = dict(layer.named_parameters())
    for name, parameter in fused.named_parameters():
        if name in before:
            assert parameter.grad is None
            assert plain.error(parameter.main_grad, before[name] + unfused[name].grad) < 1e-6
        else:
            assert torch.equal(parameter.grad, unfused[name].grad)


def test_fp8_products() -> None:
    layer = TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16
    )
    trained(layer)
    x = plain.leaf(16, 2, 64, dtype=torch.bfloat16)
    expected = layer(x)
    for is_first in (None, True, False):
        with autocast(recipe=DelayedScaling(amax_history_len=2)):
            out = layer(x, is_first_microbatch=is_first)
        assert not torch.equal(out, expected) and plain.error(out, expected) < 0.1
        out.sum().backward()


def test_no_tokens_and_strided_input() -> None:
    normed = {"output_layernorm": True, "rotary_base": 100.0, "normalization": "RMSNorm"}
    for options in ({}, normed, {"hidden_dropout": 0.1, "window_size": (2, 0)}):
        layer = make(**options)
        for shape in ((0, BATCH), (SEQ, 0)):
            layer.zero_grad()
            x = plain.leaf(*shape, HIDDEN)
            layer(x).sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
            assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
        strided = torch.randn(BATCH, HIDDEN, SEQ).permute(2, 0, 1)
        assert torch.equal(layer.eval()(strided), layer(strided.contiguous()))


def test_names_are_transformer_engines() -> None:
    layer = TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, activation="swiglu")
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "self_attention.layernorm_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.layernorm_qkv.layer_norm_bias": (HIDDEN,),
        "self_attention.layernorm_qkv.weight": (3 * HIDDEN, HIDDEN),
        "self_attention.layernorm_qkv.bias": (3 * HIDDEN,),
        "self_attention.proj.weight": (HIDDEN, HIDDEN),
        "self_attention.proj.bias": (HIDDEN,),
        "layernorm_mlp.layer_norm_weight": (HIDDEN,),
        "layernorm_mlp.layer_norm_bias": (HIDDEN,),
        "layernorm_mlp.fc1_weight": (2 * FFN, HIDDEN),
        "layernorm_mlp.fc1_bias": (2 * FFN,),
        "layernorm_mlp.fc2_weight": (HIDDEN, FFN),
        "layernorm_mlp.fc2_bias": (HIDDEN,),
    }
    assert isinstance(layer.self_attention.core_attention, nn.Module)
    assert {*TransformerLayer(HIDDEN, FFN, HEADS, output_layernorm=True).state_dict()} >= {
        "self_attention.qkv.query_weight",
        "layernorm.weight",
        "layernorm.bias",
    }


def test_initial_values() -> None:
    layer = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        init_method=lambda weight: weight.fill_(2.0),
        output_layer_init_method=lambda weight: weight.fill_(3.0),
        zero_centered_gamma=True,
    )
    for name, parameter in layer.named_parameters():
        last = name.endswith(("proj.weight", "fc2_weight"))
        expected = 0.0 if parameter.dim() == 1 else 3.0 if last else 2.0
        assert torch.equal(parameter, torch.full_like(parameter, expected)), name
