"""`Linear` against plain PyTorch in FP64, without FP8 and with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Format, autocast
from flatfsdp.layers import Embedding, LayerNormLinear, LayerNormMLP, Linear
from tests.support import plain_layers as plain
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import RECIPES
from tests.support.plain_layers import trained

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
LAYERS = pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear, LayerNormMLP])


# ---- without FP8 -------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(19,), (5, 19), (2, 3, 4, 19)])
def test_against_float64(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    layer = trained(Linear(19, 7, bias=bias, params_dtype=dtype))
    assert layer.weight.dtype == dtype
    plain.check_layer(layer, plain.leaf(*shape, dtype=dtype), plain.EPS[dtype])


@DTYPES
def test_bits_of_nn_linear(dtype: torch.dtype) -> None:
    ours, theirs = Linear(19, 7).to(dtype), nn.Linear(19, 7).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, dy = torch.randn(5, 19).to(dtype), torch.randn(5, 7).to(dtype)
    grads = []
    for layer in (ours, theirs):
        y = x.clone().requires_grad_()
        out = layer(y)
        out.backward(dy)
        grads.append((out, y.grad, layer.weight.grad))
    assert_equal(*grads)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["high", "fp8"])
def test_return_bias(bias: bool, recipe: Any) -> None:
    """The caller adds the bias, which gets its gradient there."""
    layer, x = trained(Linear(32, 48, bias=bias, return_bias=True)), torch.randn(16, 32)
    whole = Linear(32, 48, bias=bias)
    whole.load_state_dict(layer.state_dict())
    with autocast(enabled=recipe is not None, recipe=recipe):
        out, returned = layer(x)
        expected = whole(x)
    if not bias:
        assert returned is None and torch.equal(out, expected)
        return
    assert torch.equal(returned, layer.bias)
    assert plain.error(out + returned, expected) < 1e-6
    dy = torch.randn_like(out)
    (out + returned).backward(dy)
    expected.backward(dy)
    assert torch.equal(layer.weight.grad, whole.weight.grad)
    assert plain.error(layer.bias.grad, dy.sum(0)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@LAYERS
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high", "fp8"])
def test_fp32_parameters_under_torchs_autocast(dtype: torch.dtype, layer_type: type, recipe: Any) -> None:
    """Results are in the region's dtype; weight gradients are FP32 without a detour through it."""
    layer = trained(layer_type(32, 48))
    half = layer_type(32, 48).to(dtype)
    half.load_state_dict(layer.state_dict())
    x = torch.randn(2, 16, 32).requires_grad_()
    with torch.autocast("cpu", dtype), autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    assert out.dtype == dtype
    out.backward(torch.randn_like(out))
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
    weight = max(layer.parameters(), key=torch.numel)
    bias = layer.fc2_bias if layer_type is LayerNormMLP else layer.bias
    for grad in (weight.grad, bias.grad):
        assert not torch.equal(grad, grad.to(dtype).float())


def test_the_result_of_the_region_is_that_of_the_dtype() -> None:
    layer, x = trained(Linear(32, 48)), torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    weight, bias = layer.weight.bfloat16(), layer.bias.bfloat16()
    assert torch.equal(out, F.linear(x.bfloat16(), weight, bias))


@RECIPES
@LAYERS
def test_no_tokens(layer_type: type, recipe: Any) -> None:
    layer = layer_type(32, 32)
    x = torch.randn(4, 0, 32).requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    assert out.shape == (4, 0, 32)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


@pytest.mark.parametrize("fused", [True, "two_pass"])
@RECIPES
def test_no_tokens_add_nothing_to_main_grad(fused: Any, recipe: Any) -> None:
    layer = Linear(32, 32, fuse_wgrad_accumulation=fused)
    for first, start, expected in ((None, 3.0, 3.0), (True, torch.nan, 0.0)):
        layer.weight.main_grad = torch.full((32, 32), start)
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(torch.randn(0, 32).requires_grad_(), is_first_microbatch=first)
        out.sum().backward()
        assert (layer.weight.main_grad == expected).all()


@RECIPES
@LAYERS
def test_strides_do_not_matter(layer_type: type, recipe: Any) -> None:
    """This holds for the input, the gradient, and the weight."""
    torch.manual_seed(0)
    wide, grad = torch.randn(32, 16, 2), torch.randn(48, 16)
    results = []
    for contiguous in (True, False):
        torch.manual_seed(1)
        layer = layer_type(32, 48)
        x = wide[:, :, 0].t()
        x = x.contiguous() if contiguous else x
        weight = max(layer.parameters(), key=torch.numel)
        if not contiguous:
            weight.data = weight.data.t().contiguous().t()
        x.requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        dy = grad[: out.shape[1]].t()
        out.backward(dy.contiguous() if contiguous else dy)
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    assert_equal(*results)


@LAYERS
def test_an_expanded_gradient(layer_type: type) -> None:
    layer, x = layer_type(32, 48), torch.randn(16, 32).requires_grad_()
    for recipe in (None, DelayedScaling()):
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        out.sum().backward()


# ---- with FP8 ----------------------------------------------------------------------------------------------


def fp8_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x after a cast with the largest power of two that does not saturate, in FP64."""
    limit = torch.finfo(dtype).max
    scale = 2.0 ** (torch.tensor(limit) / x.abs().max()).log2().floor()
    return (x.float() * scale).to(dtype).double() / scale.double()


@DTYPES
@pytest.mark.parametrize("fp8_format", Format)
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products_are_those_of_the_casts(dtype: torch.dtype, fp8_format: Format, bias: bool) -> None:
    """They are exact except for FP32 sums and the rounding of the result."""
    layer = trained(Linear(64, 48, bias=bias).to(dtype))
    x = torch.randn(32, 64).to(dtype).requires_grad_()
    with autocast(recipe=CurrentScaling(fp8_format=fp8_format)):
        out = layer(x)
    dy = torch.randn(32, 48).to(dtype)
    out.backward(dy)
    xq, wq = (fp8_of(t.detach(), fp8_format.forward) for t in (x, layer.weight))
    dyq = fp8_of(dy, fp8_format.backward)
    added = layer.bias.double() if bias else 0
    bound = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}[dtype]
    assert plain.error(out, xq @ wq.t() + added) < bound
    assert plain.error(x.grad, dyq @ wq) < bound
    assert plain.error(layer.weight.grad, dyq.t() @ xq) < bound
    if bias:
        # From the gradient before its cast.
        assert plain.error(layer.bias.grad, dy.double().sum(0)) < bound


@pytest.mark.parametrize("fp8_format", Format)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_delayed_scaling_is_current_scaling_on_data_like_before(
    fp8_format: Format, power_of_two: bool
) -> None:
    """With the same tensors in two steps, both are bit-equal."""
    layer, x = trained(Linear(64, 48)), torch.randn(32, 64)
    dy = torch.randn(32, 48)
    results = []
    for recipe, steps in (
        (CurrentScaling(fp8_format, power_of_two_scales=power_of_two), 1),
        (DelayedScaling(fp8_format=fp8_format, power_of_two_scales=power_of_two), 2),
    ):
        for _ in range(steps):
            layer.zero_grad()
            y = x.clone().requires_grad_()
            with autocast(recipe=recipe):
                out = layer(y)
            out.backward(dy)
        results.append((out, y.grad, layer.weight.grad, layer.bias.grad))
    assert_equal(*results)


def test_margin_leaves_headroom() -> None:
    """With margin 3 an input 8 times as large as before does not saturate."""
    layer, x = Linear(32, 48, bias=False), torch.randn(16, 32)
    for margin, saturates in ((0, True), (3, False)):
        recipe = DelayedScaling(margin=margin)
        with autocast(recipe=recipe):
            layer(x)
        with torch.no_grad(), autocast(recipe=recipe):
            assert (plain.error(layer(8 * x), layer(x) * 8) > 0.1) == saturates
            assert (plain.error(layer(8 * x), 8 * x @ layer.weight.t()) > 0.1) == saturates


def test_inf_and_nan_pass_through() -> None:
    layer = Linear(32, 48)
    for bad in (torch.nan, torch.inf):
        x = torch.randn(16, 32)
        x[3, 4] = bad
        with autocast(recipe=DelayedScaling()):
            out = layer(x)
        assert out[:3].isfinite().all() and out[4:].isfinite().all()
        # Values that are too large saturate, as in every FP8 recipe; NaN stays NaN.
        assert out[3].isnan().all() == (bad != torch.inf)


@pytest.mark.parametrize("names", [["q", "k", "v"], {"q_": 16, "k_": 16, "v": 16}, {"q": 32, "k": 8, "v": 8}])
@pytest.mark.parametrize("bias", [False, True])
def test_split_parameters_are_one_product(names: Any, bias: bool) -> None:
    layer, whole = trained(Linear(32, 48, bias=bias, parameters_split=names)), Linear(32, 48, bias=bias)
    weights = [getattr(layer, f"{n}_weight") for n in "qkv"]
    with torch.no_grad():
        whole.weight.copy_(torch.cat(weights))
        if bias:
            whole.bias.copy_(torch.cat([getattr(layer, f"{n}_bias") for n in "qkv"]))
    assert len(list(layer.parameters())) == 3 * (1 + bias)
    for recipe in (None, DelayedScaling(), CurrentScaling()):
        grads = []
        for each in (layer, whole):
            each.zero_grad()
            torch.manual_seed(0)
            x = torch.randn(16, 32).requires_grad_()
            with autocast(enabled=recipe is not None, recipe=recipe):
                out = each(x)
            out.backward(torch.randn_like(out))
            grads.append((out, x.grad))
        assert_equal(*grads)
        assert torch.equal(torch.cat([weight.grad for weight in weights]), whole.weight.grad)


# ---- construction and errors -------------------------------------------------------------------------------


def test_initial_values() -> None:
    layer = Linear(300, 200)
    assert abs(layer.weight.std() - 0.023) < 1e-3 and (layer.bias == 0).all()
    assert (Linear(8, 8, init_method=lambda w: w.fill_(3.0)).weight == 3).all()
    assert Linear(8, 8, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high", "fp8"])
@LAYERS
def test_dtypes_that_do_not_fit(layer_type: type, recipe: Any) -> None:
    name = layer_type.__name__
    with autocast(enabled=recipe is not None, recipe=recipe):
        with pytest.raises(TypeError, match=rf"{name}.*bfloat16.*float32"):
            layer_type(32, 48)(torch.randn(16, 32).bfloat16())
        with pytest.raises(TypeError, match=rf"{name}.*float64"):
            layer_type(32, 48).double()(torch.randn(16, 32).double())
        with pytest.raises(TypeError, match=rf"{name}.*int64"):
            layer_type(32, 48)(torch.zeros(16, 32, dtype=torch.int64))
        with pytest.raises(ValueError, match=rf"{name}.*\(16, 31\).*32"):
            layer_type(32, 48)(torch.randn(16, 31))
        with pytest.raises(ValueError, match=name):
            layer_type(32, 48)(torch.randn(()))


@LAYERS
@RECIPES
def test_a_second_derivative_is_refused(layer_type: type, recipe: Any) -> None:
    """It would be silently wrong: GEMMs save detached and rounded operands."""
    layer, x = layer_type(32, 48), torch.randn(16, 32).requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


@pytest.mark.parametrize("value", [1, 0, np.True_, torch.tensor(True)])
def test_another_truth_value_than_pythons(value: Any) -> None:
    """It would neither overwrite main_grad nor keep the weight, unnoticed."""
    x, ids = torch.randn(16, 32), torch.zeros(16, dtype=torch.int64)
    for layer, inp in ((Linear(32, 48), x), (LayerNormMLP(32, 48), x), (Embedding(32, 48), ids)):
        with pytest.raises(TypeError, match=f"{type(layer).__name__}: is_first_microbatch is"):
            layer(inp, is_first_microbatch=value)


@pytest.mark.parametrize("transform", [torch.vmap, lambda layer: torch.func.grad(lambda x: layer(x).sum())])
def test_transforms_of_functorch_raise(transform: Any) -> None:
    """A node that is run without functorch's questions would return wrong results instead."""
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(Linear(8, 4))(torch.randn(3, 8))
