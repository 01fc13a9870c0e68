"""`LayerNormMLP` against plain PyTorch in FP64, and in FP8 against the layers that it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.kernels.activation import NAMES, activation_backward, activation_forward
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.support import plain_layers as plain
from tests.support.plain_layers import trained

NORMS = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
ACTIVATIONS = pytest.mark.parametrize("activation", NAMES)


HAS_A_KINK = ("relu", "reglu")
"""Rounding moves numbers across the kink, which changes single gradients completely: FP32 only."""


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, torch.float32) for name in NAMES]
    + [
        (name, dtype) for name in NAMES if name not in HAS_A_KINK for dtype in (torch.float16, torch.bfloat16)
    ],
)
@NORMS
@pytest.mark.parametrize("bias", [False, True])
def test_against_float64(dtype: torch.dtype, normalization: str, activation: str, bias: bool) -> None:
    options = {"normalization": normalization, "activation": activation, "params_dtype": dtype}
    layer = trained(LayerNormMLP(19, 23, bias=bias, **options))
    plain.check_layer(layer, plain.leaf(2, 5, 19, dtype=dtype), 1.5 * plain.EPS[dtype])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_zero_centred_gain(zero_centered: bool, checkpoint: bool) -> None:
    layer = trained(LayerNormMLP(32, 48, 0.1, zero_centered_gamma=zero_centered, checkpoint=checkpoint))
    plain.check_layer(layer, plain.leaf(16, 32), 1e-5)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (DelayedScaling(), torch.float32),
        (CurrentScaling(), torch.float32),
        (CurrentScaling(), torch.bfloat16),
    ],
    ids=["delayed", "current", "current-bf16"],
)
@NORMS
@ACTIVATIONS
def test_fp8_is_its_parts_one_after_the_other(
    recipe: Any, normalization: str, activation: str, dtype: torch.dtype
) -> None:
    """The parts are LayerNormLinear, the activation kernel and Linear.

    Results are bit-equal, including histories, except in bf16 with delayed scaling, which casts unrounded
    values.
    """
    options = {"normalization": normalization, "params_dtype": dtype}
    layer = trained(LayerNormMLP(32, 48, activation=activation, **options))
    up = LayerNormLinear(32, layer.fc1_weight.shape[0], **options)
    down = Linear(48, 32, params_dtype=dtype)
    state = layer.state_dict()
    up.load_state_dict({k.removeprefix("fc1_"): v for k, v in state.items() if not k.startswith("fc2")})
    down.load_state_dict({k.removeprefix("fc2_"): v for k, v in state.items() if k.startswith("fc2")})
    for _ in range(3):
        x, dy = torch.randn(16, 32).to(dtype).requires_grad_(), torch.randn(16, 32).to(dtype)
        y = x.detach().clone().requires_grad_()
        for module in (layer, up, down):
            module.zero_grad()
        with autocast(recipe=recipe):
            out = layer(x)
            hidden = up(y)
            middle = activation_forward(hidden.detach(), activation).out.requires_grad_()
            result = down(middle)
        assert torch.equal(out, result)
        out.backward(dy)
        result.backward(dy)
        hidden.backward(activation_backward(middle.grad, hidden.detach(), activation).dx)
        assert torch.equal(x.grad, y.grad)
        for name, grad in (
            ("layer_norm_weight", up.layer_norm_weight.grad),
            ("fc1_weight", up.weight.grad),
            ("fc2_weight", down.weight.grad),
            ("fc2_bias", down.bias.grad),
        ):
            assert torch.equal(getattr(layer, name).grad, grad), name
        # Sums over rows of the FP32 gradient, which the parts have rounded.
        bound = 1e-6 if dtype == torch.float32 else 1e-2
        assert plain.error(layer.fc1_bias.grad, up.bias.grad) < bound
    if isinstance(recipe, DelayedScaling):
        for key in ("fp8_forward_scale", "fp8_forward_amax_history"):
            parts = [getattr(module, key) for module in (up, down)]
            assert torch.equal(getattr(layer, key), torch.cat(parts, -1)), key
        parts = [module.fp8_backward_amax_history for module in (up, down)]
        assert torch.equal(layer.fp8_backward_amax_history, torch.cat(parts, -1))


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high", "fp8"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_result(recipe: Any, checkpoint: bool) -> None:
    options = {"return_bias": True, "return_layernorm_output": True, "checkpoint": checkpoint}
    layer, whole = trained(LayerNormMLP(32, 48, **options)), LayerNormMLP(32, 48)
    whole.load_state_dict(layer.state_dict())
    x = torch.randn(2, 16, 32).requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out, bias, normalized, residual = layer(x, return_residual=True)
        simple = whole(x)
    assert torch.equal(bias, layer.fc2_bias) and torch.equal(residual, x)
    assert plain.error(out + bias, simple) < 1e-6
    norm = plain.norm(x, layer.layer_norm_weight, layer.layer_norm_bias)
    assert plain.error(normalized, norm) < 1e-6
    dy = torch.randn_like(out)
    grads = torch.autograd.grad([out, normalized, residual], x, [dy, dy, dy])
    parts = [torch.autograd.grad(t, x, dy, retain_graph=True)[0] for t in (simple, norm)]
    assert plain.error(grads[0], parts[0] + parts[1] + dy) < 1e-6


def test_initial_values() -> None:
    layer = LayerNormMLP(256, 256)
    for weight in (layer.fc1_weight, layer.fc2_weight):
        assert abs(weight.std() - 0.023) < 1e-3
    assert sorted(LayerNormMLP(8, 8, bias=False, normalization="RMSNorm").state_dict()) == [
        "fc1_weight",
        "fc2_weight",
        "layer_norm_weight",
    ]
