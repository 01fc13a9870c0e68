"""`LayerNormLinear` against plain PyTorch in FP64, and against norm and `Linear` separately in FP8."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.kernels.norm.forward import norm_forward
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.support import plain_layers as plain
from tests.support.fp8_layers import RECIPES
from tests.support.plain_layers import trained

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
CHECKPOINTED = partial(LayerNormMLP, checkpoint=True)
NORMS = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])


@DTYPES
@NORMS
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_against_float64(
    dtype: torch.dtype, normalization: str, zero_centered: bool, bias: bool, eps: float
) -> None:
    options = {"normalization": normalization, "zero_centered_gamma": zero_centered}
    layer = trained(LayerNormLinear(19, 7, eps, bias=bias, params_dtype=dtype, **options))
    plain.check_layer(layer, plain.leaf(2, 5, 19, dtype=dtype), 2 * plain.EPS[dtype])


@NORMS
@pytest.mark.parametrize("returns", ["out", "normalized", "residual", "out+normalized", "all"])
def test_gradients_of_every_result(normalization: str, returns: str) -> None:
    """Results are used alone and together; in FP64 the residual is the input itself."""
    layer = trained(LayerNormLinear(32, 48, normalization=normalization, return_layernorm_output=True))

    def chosen(out: Tensor, normalized: Tensor, residual: Tensor) -> Tensor:
        parts = {
            "out": [out.sin()],
            "normalized": [normalized.cos()],
            "residual": [residual.exp()],
            "out+normalized": [out.sin(), normalized.cos()],
            "all": [out.sin(), normalized.cos(), residual.exp()],
        }[returns]
        return torch.cat([part.flatten() for part in parts])

    inputs = [plain.leaf(16, 32), *layer.parameters()]
    ours = chosen(*layer(inputs[0], return_residual=True))
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = chosen(*plain.expected(layer, *doubles), doubles[0])
    assert plain.error(ours, exact) < 1e-5
    grads = torch.autograd.grad(ours.sum(), inputs, allow_unused=True)
    exact_grads = torch.autograd.grad(exact.sum(), doubles, allow_unused=True)
    for ours, exact in zip(grads, exact_grads, strict=True):
        assert (ours is None) == (exact is None)
        assert ours is None or plain.error(ours, exact) < 1e-5


@RECIPES
@NORMS
@pytest.mark.parametrize("unused", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("make", [LayerNormLinear, LayerNormMLP, CHECKPOINTED])
def test_results_that_are_not_used(
    normalization: str, recipe: Any, make: Any, unused: tuple[int, ...]
) -> None:
    """They count as having a zero gradient, to the last bit; expanded gradients are supported, too."""
    results = []
    for by_zeros in (False, True):
        torch.manual_seed(0)
        layer = trained(make(32, 48, normalization=normalization, return_layernorm_output=True))
        x = torch.randn(16, 32).requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            outs = layer(x, return_residual=True)
        grads = [torch.full((), 0.25 * (i + 1)).expand(out.shape) for i, out in enumerate(outs)]
        if by_zeros:
            grads = [torch.zeros_like(g) if i in unused else g.clone() for i, g in enumerate(grads)]
        used = [i for i in range(3) if by_zeros or i not in unused]
        torch.autograd.backward([outs[i] for i in used], [grads[i] for i in used])
        weights = {name: p.grad for name, p in layer.named_parameters()}
        assert (weights.get("fc1_weight", weights.get("weight")) is not None) == (0 in used)
        results.append([torch.zeros(()) if g is None else g for g in (x.grad, *weights.values())])
    for a, b in zip(*results, strict=True):
        assert plain.error(a.expand_as(b), b) < 1e-6


def test_order_of_results() -> None:
    layer = trained(LayerNormLinear(32, 48, return_bias=True, return_layernorm_output=True))
    x = torch.randn(2, 16, 32)
    out, bias, normalized, residual = layer(x, return_residual=True)
    assert out.shape == (2, 16, 48) and torch.equal(bias, layer.bias)
    assert normalized.shape == (2, 16, 32) and torch.equal(residual, x)
    assert plain.error(out + bias, F.linear(normalized, layer.weight, layer.bias)) < 1e-6


@DTYPES
@NORMS
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=["delayed", "current"])
def test_fp8_is_norm_then_linear(
    dtype: torch.dtype, normalization: str, zero_centered: bool, recipe: Any
) -> None:
    """Current scaling casts the norm's rounded result, delayed scaling the result before rounding."""
    options = {"normalization": normalization, "zero_centered_gamma": zero_centered}
    layer = trained(LayerNormLinear(32, 48, params_dtype=dtype, **options))
    linear = Linear(32, 48, params_dtype=dtype if isinstance(recipe, CurrentScaling) else torch.float32)
    linear.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(16, 32).to(dtype)
    normalized = norm_forward(
        x.to(linear.weight.dtype),
        layer.layer_norm_weight.detach(),
        None if layer.layer_norm_bias is None else layer.layer_norm_bias.detach(),
        eps=1e-5,
        rms=layer.norm.rms,
        zero_centered=zero_centered,
    ).out
    if isinstance(recipe, DelayedScaling):
        # The first casts take scales of their own; here, both layers begin with the scales of a first step.
        with autocast(recipe=recipe):
            layer(x).sum().backward()
        linear.load_state_dict(layer.state_dict(), strict=False)
    for _ in range(2):
        normalized.requires_grad_()
        normalized.grad = None
        layer.zero_grad()
        linear.zero_grad()
        with autocast(recipe=recipe):
            ours, theirs = layer(x), linear(normalized)
        assert torch.equal(ours, theirs.to(dtype))
        dy = torch.randn_like(ours)
        ours.backward(dy)
        theirs.backward(dy.to(theirs.dtype))
        assert torch.equal(layer.weight.grad, linear.weight.grad.to(dtype))
        assert torch.equal(layer.bias.grad, linear.bias.grad.to(dtype))
    if isinstance(recipe, DelayedScaling):
        for key in ("fp8_forward_scale", "fp8_forward_amax_history", "fp8_backward_amax_history"):
            assert torch.equal(getattr(layer, key), getattr(linear, key))


@NORMS
@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=["delayed", "current"])
def test_gradients_through_the_norm_in_fp8(normalization: str, recipe: Any) -> None:
    """They are those of the norm, given the linear layer's exact gradient of its input."""
    layer = trained(LayerNormLinear(32, 48, normalization=normalization))
    x, dy = torch.randn(16, 32).requires_grad_(), torch.randn(16, 48)
    with autocast(recipe=recipe):
        out = layer(x)
    out.backward(dy)
    linear = Linear(32, 48)
    linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    middle = torch.zeros(16, 32).requires_grad_()
    with autocast(recipe=recipe):
        linear(middle).backward(dy)
    inputs = [x, layer.layer_norm_weight, *([] if layer.layer_norm_bias is None else [layer.layer_norm_bias])]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    normalized = plain.norm(doubles[0], *doubles[1:], *[None] * (3 - len(doubles)), rms=layer.norm.rms)
    normalized.backward(middle.grad.double())
    for ours, exact in zip(inputs, doubles, strict=True):
        assert plain.error(ours.grad, exact.grad) < 1e-5


NORM = {"layer_norm_weight", "layer_norm_bias"}
ALL = {*NORM, "weight", "bias"}
MLP_TRAINS = [{"fc2_weight"}, {"fc2_bias"}, {"fc1_bias"}, {"fc1_weight", "fc2_weight"}, {"layer_norm_weight"}]
MLP_TRAINS += [{"layer_norm_bias", "fc2_bias"}, set()]


@RECIPES
@pytest.mark.parametrize(
    ("make", "trains"),
    [
        *((LayerNormLinear, ALL - frozen) for frozen in ({"weight"}, {"bias"}, NORM, ALL)),
        *((make, trains) for make in (LayerNormMLP, CHECKPOINTED) for trains in MLP_TRAINS),
    ],
)
@pytest.mark.parametrize("input_grad", [False, True])
def test_freezing_changes_no_other_gradient(recipe: Any, make: Any, trains: Any, input_grad: bool) -> None:
    def run(needs_grad: bool, trained_names: Any = None) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        layer = trained(make(32, 48))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained_names is None or name in trained_names)
        x = torch.randn(16, 32, requires_grad=needs_grad)
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        if out.requires_grad:
            out.backward(torch.randn(out.shape))
        return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}

    everything, some = run(True), run(input_grad, trains)
    for name, grad in some.items():
        assert (grad is not None) == (input_grad if name == "x" else name in trains), name
        assert grad is None or torch.equal(grad, everything[name]), name


def test_a_residual_that_needs_no_gradient() -> None:
    layer = LayerNormLinear(32, 48)
    out, residual = layer(torch.randn(16, 32), return_residual=True)
    (out.sum() + residual.sum()).backward()
    with torch.no_grad():
        out, residual = layer(torch.randn(16, 32), return_residual=True)
    assert not residual.requires_grad


def test_a_residual_cannot_be_changed_in_place() -> None:
    """It shares memory with the input, which the backward of the norm reads."""
    _, residual = LayerNormLinear(32, 48)(torch.randn(16, 32).requires_grad_() * 1, return_residual=True)
    with pytest.raises(RuntimeError, match="inplace"):
        residual.mul_(2.0)


def test_initial_values() -> None:
    for zero_centered, gain in ((False, 1.0), (True, 0.0)):
        layer = LayerNormLinear(8, 4, zero_centered_gamma=zero_centered)
        assert (layer.layer_norm_weight == gain).all() and (layer.layer_norm_bias == 0).all()
    layer = LayerNormLinear(8, 4, normalization="RMSNorm", bias=False)
    assert layer.layer_norm_bias is None and layer.bias is None
    assert sorted(layer.state_dict()) == ["layer_norm_weight", "weight"]


@RECIPES
def test_split_parameters(recipe: Any) -> None:
    make = partial(LayerNormLinear, 32, 48)
    layer, whole = trained(make(parameters_split=("q", "k", "v"))), make()
    state = {k: v for k, v in layer.state_dict().items() if k.startswith("layer_norm")}
    for kind in ("weight", "bias"):
        state[kind] = torch.cat([getattr(layer, f"{name}_{kind}") for name in "qkv"])
    whole.load_state_dict(state)
    x = torch.randn(16, 32)
    with autocast(enabled=recipe is not None, recipe=recipe):
        assert torch.equal(layer(x), whole(x))
