"""Bias gradients: FP32 sums of the incoming gradient, whatever happens to the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import LayerNormLinear, Linear

LAYERS = pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear])


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, "two_pass"])
@pytest.mark.parametrize("trains_input", [True, False])
def test_without_fp8(layer_type: type, dtype: torch.dtype, fused: Any, trains_input: bool) -> None:
    layer = layer_type(19, 7, fuse_wgrad_accumulation=fused, params_dtype=dtype)
    layer.weight.main_grad = torch.randn(7, 19)
    dy = torch.randn(2, 5, 7).to(dtype)
    layer(torch.randn(2, 5, 19).to(dtype).requires_grad_(trains_input)).backward(dy)
    assert torch.equal(layer.bias.grad, dy.flatten(0, 1).float().sum(0).to(dtype))


@LAYERS
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_where_one_of_the_two_is_frozen(layer_type: type, frozen: str) -> None:
    layer = layer_type(19, 7, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(7, 19)
    getattr(layer, frozen).requires_grad_(False)
    dy = torch.randn(5, 7)
    layer(torch.randn(5, 19).requires_grad_()).backward(dy)
    assert layer.bias.grad is None if frozen == "bias" else torch.equal(layer.bias.grad, dy.sum(0))
    assert layer.weight.main_grad.any() == (frozen == "bias")


@LAYERS
def test_without_accumulation_in_fp32_too(layer_type: type) -> None:
    """A 16-bit weight gradient comes from torch's own GEMM."""
    layer = layer_type(19, 7, params_dtype=torch.bfloat16)
    dy = torch.randn(5, 7).bfloat16()
    layer(torch.randn(5, 19).bfloat16()).backward(dy)
    assert torch.equal(layer.bias.grad, dy.float().sum(0).bfloat16())


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()])
@LAYERS
def test_in_fp8_the_cast_sums(layer_type: type, recipe: Any) -> None:
    """The cast sums values that are not rounded to FP8 yet."""
    layer = layer_type(32, 16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 32)
    dy = torch.randn(16, 16)
    with autocast(recipe=recipe):
        out = layer(torch.randn(16, 32))
    out.backward(dy)
    torch.testing.assert_close(layer.bias.grad, dy.sum(0), rtol=1e-6, atol=1e-5)
