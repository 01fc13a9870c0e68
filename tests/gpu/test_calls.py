"""Calls of layers with foreign parameters on the GPU: bit-equal to our layers; weights [in, out]."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.kernels.gemm.wgrad import wgrad
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.support.foreign_layers import claimed, gradients, norm_mlp_of, owner, turned, two_calls
from tests.support.gpu.marks import FP8_GEMMS
from tests.support.plain_layers import EPS, error

pytestmark = FP8_GEMMS
SIZES = {"width": 512, "ffn": 768}
TOKENS = 1024
RECIPES = pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(amax_history_len=4), CurrentScaling()], ids=["high", "delayed", "current"]
)


def batch() -> Tensor:
    return torch.randn(TOKENS, SIZES["width"], device="cuda", dtype=torch.bfloat16)


def copied(parameters: list[nn.Parameter], values: nn.Module) -> nn.ParameterList:
    with torch.no_grad():
        for parameter, value in zip(parameters, values.parameters(), strict=True):
            parameter.copy_(value)
    return nn.ParameterList(parameters)


@RECIPES
def test_layers_are_calls_with_parameters_of_their_own(recipe: Any) -> None:
    values = owner(**SIZES)
    width, ffn = SIZES["width"], SIZES["ffn"]
    options: Any = {"normalization": "RMSNorm", "device": "cuda", "params_dtype": torch.bfloat16}
    first = LayerNormLinear(width, 2 * ffn, bias=False, **options)
    second = Linear(ffn, width, device="cuda", params_dtype=torch.bfloat16)
    mlp = LayerNormMLP(width, ffn, activation="swiglu", return_layernorm_output=True, **options)
    mlp.fc1_bias = None
    apart = copied([first.layer_norm_weight, first.weight, second.weight, second.bias], values)
    together = copied([mlp.layer_norm_weight, mlp.fc1_weight, mlp.fc2_weight, mlp.fc2_bias], values)
    x = batch()

    def both(x: Tensor) -> tuple[Tensor, ...]:
        mixed, summed = first(x, return_residual=True)
        return second(mixed[..., :ffn]), summed

    pairs = (
        (two_calls, apart, both),
        (norm_mlp_of, together, lambda x: mlp(x, residual=x * 2, return_residual=True)),
    )
    for call, parameters, layers in pairs:
        foreign = owner(**SIZES).to("cuda", torch.bfloat16)
        ours = gradients(foreign, x, partial(call, foreign), recipe)
        theirs = gradients(parameters, x, layers, recipe)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


@RECIPES
@pytest.mark.parametrize("fused", [True, "two_pass", False])
def test_transposed_weights(recipe: Any, fused: Any) -> None:
    """The weight's gradient has the input, E4M3, as left operand, and the gradient, E5M2, as right one."""
    plain = owner(**SIZES).to("cuda", torch.bfloat16)
    other = turned(**SIZES, fuse_wgrad_accumulation=fused).to("cuda", torch.bfloat16)
    buffers = [claimed(layer.weight) for layer in (other.up, other.down)]
    x = batch()
    theirs = gradients(plain, x, partial(two_calls, plain), recipe)
    ours = gradients(other, x, partial(two_calls, other), recipe)
    if fused:
        ours[-3:-1] = buffers
    ours[-3:-1] = [grad.t() for grad in ours[-3:-1]]
    for one, expected in zip(ours, theirs, strict=True):
        assert error(one, expected) < EPS[torch.bfloat16]


@pytest.mark.parametrize("first", [True, False])
def test_the_input_as_the_left_operand(first: bool) -> None:
    x = torch.randn(512, TOKENS, device="cuda").to(torch.float8_e4m3fn)
    dy = torch.randn(768, TOKENS, device="cuda").to(torch.float8_e5m2)
    one = torch.ones(1, device="cuda")
    target = torch.randn(512, 768, device="cuda")
    expected = x.double() @ dy.double().t() + (0 if first else target.double())
    wgrad(target, x, dy, first=first, dy_scale_inv=one, x_scale_inv=one)
    assert error(target, expected) < 5e-4
