"""Layers and calls: the same computation, whoever has the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LinearCrossEntropy,
)
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import NormOf, linear, norm_linear, norm_mlp, prepare
from flatfsdp.layers.loss.cross_entropy import Reduction
from flatfsdp.layers.loss.linear_cross_entropy import linear_cross_entropy
from flatfsdp.layers.normalized import NormKind
from tests.support.fp8_layers import RECIPES, SHORT, TOKENS, WIDTH
from tests.support.plain_layers import trained

FFN = 48
RMS = NormKind(1e-5, rms=True, zero_centered=False)


class Foreign(nn.Module):
    """A model of another library, with one parameter a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH)
        self.kept = "as it was"


class Owner(Foreign, MatmulLayer):
    """The same once it is an owner of two maps."""

    linear_maps = ("up_weight", "down_weight")

    @property
    def norm_of(self) -> NormOf:
        return NormOf(self.norm.weight, None, RMS)

    @property
    def maps(self) -> tuple[MapOf, MapOf]:
        return (
            MapOf("up_weight", self.up.weight, self.up.bias),
            MapOf("down_weight", self.down.weight, self.down.bias),
        )


def owner(**options: Any) -> Owner:
    """One that was constructed as something else."""
    torch.manual_seed(0)
    module: Any = trained(Foreign())
    module.__class__ = Owner
    module._become(**options)
    return module


def gradients(module: nn.Module, x: Tensor, call: Callable[[Tensor], tuple[Tensor, ...]], recipe: Any) -> Any:
    """Results and gradients of two microbatches, in the order of `parameters()`."""
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            outs = call(leaf)
        sum(out.float().square().sum() for out in outs).backward()
        found += [*outs, leaf.grad]
    return [*found, *(p.grad for p in module.parameters())]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def norm_mlp_of(module: Owner, x: Tensor) -> tuple[Tensor, ...]:
    fc1, fc2 = module.maps
    casts = prepare(module, x, fc1, fc2)
    called = norm_mlp(module, module.norm_of, fc1, fc2, x, casts, "swiglu", residual=x * 2, keep=True)
    assert called.normalized is not None
    return called.out, called.normalized, called.summed


@RECIPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_of_foreign_parameters(recipe: Any, dtype: torch.dtype) -> None:
    foreign = owner().to(dtype)
    layer = LayerNormMLP(
        WIDTH,
        FFN,
        activation="swiglu",
        normalization="RMSNorm",
        params_dtype=dtype,
        return_layernorm_output=True,
    )
    layer.fc1_bias = None
    with torch.no_grad():
        values = (foreign.norm.weight, foreign.up.weight, foreign.down.weight, foreign.down.bias)
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.copy_(value)
    x = torch.randn(TOKENS, WIDTH).to(dtype)
    ours = gradients(foreign, x, partial(norm_mlp_of, foreign), recipe)
    theirs = gradients(layer, x, lambda x: layer(x, residual=x * 2, return_residual=True), recipe)
    assert_equal(ours, theirs)


def two_calls(module: Owner, x: Tensor) -> tuple[Tensor, ...]:
    up, down = module.maps
    casts = prepare(module, x, up, down)
    mixed, _, summed = norm_linear(module, module.norm_of, up, x, casts[0])
    return linear(module, down, mixed[..., :FFN], casts[1]), summed


@RECIPES
def test_two_maps_of_one_owner_are_two_layers(recipe: Any) -> None:
    """Attention's projections: scales are prepared once for both."""
    foreign = owner()
    first = LayerNormLinear(WIDTH, 2 * FFN, normalization="RMSNorm", bias=False)
    second = Linear(FFN, WIDTH)
    # In the order of the foreign model's.
    layers = nn.ParameterList((first.layer_norm_weight, first.weight, second.weight, second.bias))
    with torch.no_grad():
        for parameter, value in zip(layers, foreign.parameters(), strict=True):
            parameter.copy_(value)
    x = torch.randn(2, TOKENS // 2, WIDTH)

    def both(x: Tensor) -> tuple[Tensor, ...]:
        mixed, summed = first(x, return_residual=True)
        return second(mixed[..., :FFN]), summed.view(-1, WIDTH)

    assert_equal(
        gradients(foreign, x, partial(two_calls, foreign), recipe), gradients(layers, x, both, recipe)
    )


def test_what_becomes_an_owner_is_itself_again() -> None:
    module: Any = Foreign()
    before, keys = dict(vars(module)), list(module.state_dict())
    module.__class__ = Owner
    module._become(fuse_wgrad_accumulation="if_claimed")
    module.allows_fp8 = True
    assert list(module.state_dict()) == keys and isinstance(module.up, nn.Linear)
    with autocast(recipe=SHORT):
        norm_mlp_of(module, torch.randn(TOKENS, WIDTH))[0].sum().backward()
    assert "fp8_forward_scale" in module.state_dict()
    assert module.state_dict()["fp8_forward_scale"].shape == (4,)
    module._resign()
    module.__class__ = Foreign
    assert vars(module) == before and list(module.state_dict()) == keys


def test_sizes_that_do_not_suit_fp8_are_named_by_the_owners_maps() -> None:
    module: Any = owner()
    module.down = nn.Linear(FFN, 20)
    with (
        autocast(recipe=CurrentScaling()),
        pytest.raises(ValueError, match=r"Owner\.down_weight.*out_features is 20"),
    ):
        two_calls(module, torch.randn(TOKENS, WIDTH))


# ---- where gradients go ---------------------------------------------------------------------------------


def claimed(weight: Tensor) -> Tensor:
    """Its main_grad, as FlatFSDP's parameters have it; zeros, in which nothing has landed."""
    buffer = torch.zeros(weight.shape)
    written: list[bool] = []

    def claim() -> tuple[Tensor, bool]:
        written.append(True)
        return buffer, len(written) == 1

    weight.claim_main_grad = claim  # type: ignore[attr-defined]
    return buffer


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["high", "current"])
def test_if_claimed_fuses_where_an_engine_has_the_weight(recipe: Any) -> None:
    """Decided when the layer is called, one map by itself."""
    x = torch.randn(TOKENS, WIDTH)
    fused, plain = owner(fuse_wgrad_accumulation="if_claimed"), owner()
    buffer = claimed(fused.up.weight)
    ours, theirs = (gradients(m, x, partial(two_calls, m), recipe) for m in (fused, plain))
    assert fused.up.weight.grad is None
    assert torch.equal(buffer, plain.up.weight.grad)
    assert torch.equal(fused.down.weight.grad, plain.down.weight.grad)
    assert_equal([t for t in ours if t is not None][:-3], theirs[:-4])
    del fused.up.weight.claim_main_grad
    gradients(fused, x, partial(two_calls, fused), recipe)
    assert torch.equal(fused.up.weight.grad, buffer)


def test_if_claimed_needs_no_engine() -> None:
    layer, plain = Linear(4, 6, fuse_wgrad_accumulation="if_claimed"), Linear(4, 6)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4)
    for each in (layer, plain):
        each(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


# ---- the head -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
def test_a_head_of_foreign_parameters(chunk_tokens: int | None, kind: Any) -> None:
    class Head(nn.Linear, MatmulLayer):
        linear_maps = ("weight",)
        allows_fp8 = False

    foreign: Any = nn.Linear(16, 40, bias=False)
    layer = LinearCrossEntropy(16, 40, reduction=kind, chunk_tokens=chunk_tokens)
    layer.load_state_dict(foreign.state_dict())
    foreign.__class__ = Head
    foreign._become()
    x, ids = torch.randn(3, 7, 16), torch.randint(0, 40, (3, 7))
    ids[1] = -100
    of = MapOf("weight", foreign.weight, None)
    how = Reduction(-100, kind)
    found = []
    for each in (
        lambda x: linear_cross_entropy(foreign, of, x, ids, how, chunk_tokens),
        lambda x: layer(x, ids),
    ):
        leaf = x.clone().requires_grad_()
        loss = each(leaf)
        loss.sum().backward()
        found.append((loss, leaf.grad))
    assert_equal([*found[0], foreign.weight.grad], [*found[1], layer.weight.grad])
