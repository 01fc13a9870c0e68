"""Bias gradients: who sums the columns of the gradient, and that the sums are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast, products
from flatfsdp.layers import LayerNormLinear, Linear

LAYERS = pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear])


@pytest.fixture
def summed_by_product(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each product that accumulates a weight gradient, whether it was asked for sums as well."""
    kernel = products.wgrad_kernels.wgrad
    asked = []

    def recorded(*args: Any, bias_grad: Tensor | None = None, **options: Any) -> None:
        asked.append(bias_grad is not None)
        kernel(*args, bias_grad=bias_grad, **options)

    monkeypatch.setattr(products.wgrad_kernels, "wgrad", recorded)
    return asked


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, "two_pass"])
@pytest.mark.parametrize("trains_input", [True, False])
def test_without_fp8_the_product_of_the_weights_gradient_sums(
    layer_type: type, dtype: torch.dtype, fused: Any, trains_input: bool, summed_by_product: list[bool]
) -> None:
    layer = layer_type(19, 7, fuse_wgrad_accumulation=fused, params_dtype=dtype)
    layer.weight.main_grad = torch.randn(7, 19)
    dy = torch.randn(2, 5, 7).to(dtype)
    layer(torch.randn(2, 5, 19).to(dtype).requires_grad_(trains_input)).backward(dy)
    assert summed_by_product == [True]
    assert torch.equal(layer.bias.grad, dy.flatten(0, 1).float().sum(0).to(dtype))


@LAYERS
@pytest.mark.parametrize(
    ("frozen", "bias", "asked"), [("weight", True, []), ("bias", True, [False]), ("none", False, [False])]
)
def test_it_sums_only_where_both_have_a_gradient(
    layer_type: type, frozen: str, bias: bool, asked: list[bool], summed_by_product: list[bool]
) -> None:
    layer = layer_type(19, 7, bias=bias, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(7, 19)
    if frozen != "none":
        getattr(layer, frozen).requires_grad_(False)
    dy = torch.randn(5, 7)
    layer(torch.randn(5, 19).requires_grad_()).backward(dy)
    assert summed_by_product == asked
    if frozen == "weight":
        assert torch.equal(layer.bias.grad, dy.sum(0))


@LAYERS
def test_without_accumulation_in_fp32_too(layer_type: type) -> None:
    """A 16-bit weight gradient comes from torch's own product."""
    layer = layer_type(19, 7, params_dtype=torch.bfloat16)
    dy = torch.randn(5, 7).bfloat16()
    layer(torch.randn(5, 19).bfloat16()).backward(dy)
    assert torch.equal(layer.bias.grad, dy.float().sum(0).bfloat16())


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()])
@LAYERS
def test_in_fp8_the_cast_sums(layer_type: type, recipe: Any, summed_by_product: list[bool]) -> None:
    """What is not rounded to FP8 yet."""
    layer = layer_type(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 32)
    dy = torch.randn(16, 16)
    with autocast(recipe=recipe):
        out = layer(torch.randn(16, 32))
    out.backward(dy)
    assert not any(summed_by_product)
    torch.testing.assert_close(layer.bias.grad, dy.sum(0), rtol=1e-6, atol=1e-5)
