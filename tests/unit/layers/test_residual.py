"""A residual added by the norm's kernel, against one added before the layer."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import autocast
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, TransformerLayer
from tests.support import plain_layers as plain
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import RECIPES
from tests.support.plain_layers import trained

LAYERS = pytest.mark.parametrize("layer_type", [LayerNormLinear, LayerNormMLP])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SEQ, BATCH, HIDDEN, FFN, HEADS = 8, 2, 32, 48, 4


@RECIPES
@DTYPES
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    "make",
    [LayerNormLinear, LayerNormMLP, partial(LayerNormMLP, checkpoint=True)],
    ids=["linear", "mlp", "checkpoint"],
)
@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (2,)])
def test_results_and_gradients_have_the_bits_of_an_addition_before_the_layer(
    normalization: str, make: Any, recipe: Any, used: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The norm sees the rounded sum; both addends get the same gradient, and those of two steps add up."""
    options = {"normalization": normalization, "return_layernorm_output": True, "params_dtype": dtype}
    results = []
    for inside in (True, False):
        torch.manual_seed(0)
        layer = trained(make(32, 48, **options), 1 / 4)
        x, residual = (plain.leaf(2, 16, 32, dtype=dtype) for _ in range(2))
        for _ in range(2):
            with autocast(enabled=recipe is not None, recipe=recipe):
                if inside:
                    outs = layer(x, residual=residual, return_residual=True)
                else:
                    outs = layer(x + residual, return_residual=True)
            sum((outs[i].float().sin().sum() for i in used), torch.zeros(())).backward()
        grads = [t.grad for t in (x, residual, *layer.parameters())]
        results.append([*outs, *grads, *layer.buffers()])
    assert_equal(*results)


@LAYERS
@DTYPES
@pytest.mark.parametrize("layer_trains", [False, True])
@pytest.mark.parametrize("trains", [(True, False), (False, True), (False, False)])
def test_one_addend_alone_may_need_a_gradient(
    layer_type: type, dtype: torch.dtype, layer_trains: bool, trains: tuple[bool, bool]
) -> None:
    layer = layer_type(32, 48, params_dtype=dtype).requires_grad_(layer_trains)
    x, residual = (torch.randn(16, 32).to(dtype).requires_grad_(needed) for needed in trains)
    summed = (x + residual).detach().requires_grad_()
    found = []
    for out in (layer(x, residual=residual), layer(summed)):
        layer.zero_grad()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        found.append([parameter.grad for parameter in layer.parameters()])
    assert_equal(*found)
    for tensor, needed in zip((x, residual), trains, strict=True):
        assert (tensor.grad is not None) == needed
        assert not needed or torch.equal(tensor.grad, summed.grad)


@LAYERS
def test_gradients_of_both_addends_add_up(layer_type: type) -> None:
    """There are two backwards, with both addends leaves, or both the same tensor."""
    layer, x, residual = layer_type(32, 48), plain.leaf(16, 32), plain.leaf(16, 32)
    summed = (x + residual).detach().requires_grad_()
    for _ in range(2):
        layer(x, residual=residual).sum().backward()
        layer(summed).sum().backward()
    assert torch.equal(x.grad, summed.grad) and torch.equal(residual.grad, summed.grad)
    half = (summed / 2).detach().requires_grad_()
    layer(half, residual=half).sum().backward()
    assert plain.error(half.grad, summed.grad) < 1e-6


@LAYERS
def test_the_sum_cannot_be_changed_in_place(layer_type: type) -> None:
    """The backward of the norm reads it."""
    x, residual = torch.randn(16, 32), torch.randn(16, 32)
    out, summed = layer_type(32, 48)(x, residual=residual, return_residual=True)
    summed.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@LAYERS
def test_both_are_cast_under_torchs_autocast(layer_type: type) -> None:
    layer, x, residual = layer_type(32, 48), plain.leaf(16, 32), plain.leaf(16, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, summed = layer(x, residual=residual, return_residual=True)
    assert out.dtype == summed.dtype == torch.bfloat16
    assert torch.equal(summed, x.bfloat16() + residual)
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad.bfloat16(), residual.grad)


@LAYERS
@pytest.mark.parametrize("seq", [8, 16])
def test_shapes_have_to_be_the_same(layer_type: type, seq: int) -> None:
    """Also if there are as many elements."""
    message = rf"{layer_type.__name__}: the residual has shape \(16, 32\).*\(2, {seq}, 32\)"
    with pytest.raises(ValueError, match=message):
        layer_type(32, 48)(torch.randn(2, seq, 32), residual=torch.randn(16, 32))


# ---- TransformerLayer ----------------------------------------------------------------------------------


def make(**options: Any) -> Any:
    defaults = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return trained(TransformerLayer(HIDDEN, FFN, HEADS, **{**defaults, **options}), 1 / 4)


def with_separate_additions(layer: Any, x: Tensor) -> Tensor:
    attention, perceptron = layer.self_attention, layer.layernorm_mlp
    attended, residual = attention(x, return_residual=not attention.return_layernorm_output)
    between = attended + residual
    out, residual = perceptron(between, return_residual=not perceptron.return_layernorm_output)
    out = out + residual
    return layer.layernorm(out) if layer.output_layernorm else out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization": "RMSNorm"},
        {"apply_residual_connection_post_layernorm": True},
        {"output_layernorm": True, "bias": False},
    ],
)
@DTYPES
def test_without_dropout_the_second_norm_adds(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer, x = make(params_dtype=dtype, **options), plain.leaf(SEQ, BATCH, HIDDEN, dtype=dtype)
    dy = torch.randn(SEQ, BATCH, HIDDEN).to(dtype)
    results = []
    for run in (layer, partial(with_separate_additions, layer)):
        out = run(x)
        results.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], dy)])
    assert_equal(*results)
    with mock.patch.object(layer, "_add", wraps=layer._add) as separate:
        layer(x)
    assert separate.call_count == 1, "after the perceptron only"


def test_dropout_may_be_turned_off_later() -> None:
    layer, without, x = make(hidden_dropout=0.5), make(), torch.randn(SEQ, BATCH, HIDDEN)
    without.load_state_dict(layer.state_dict())
    layer.hidden_dropout = 0.0
    assert plain.error(layer(x), without(x)) < 1e-6


def test_hooks_of_the_perceptron_see_the_residual() -> None:
    """A wrapper around it, such as FlatFSDP, sees both addends."""
    layer, seen = make(), []

    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append(torch.equal(options["residual"], x))

    layer.layernorm_mlp.register_forward_pre_hook(hook, with_kwargs=True)
    x = torch.randn(SEQ, BATCH, HIDDEN)
    layer(x)
    assert seen == [True]
