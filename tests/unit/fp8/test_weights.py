"""FP8 weights: cast once a step, and never read with another scale than that of their cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.fp8.quantizers import Blockwise, Current, Delayed
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import FFN, FP8_RECIPES, SHORT, TOKENS, WIDTH, Stack, batch, seeded
from tests.support.plain_layers import error

E4M3 = torch.float8_e4m3fn
LAYERS = pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear, LayerNormMLP])


def fp8_of(x: Tensor, scale: Tensor) -> Tensor:
    """x after a cast to E4M3 and back, in FP64."""
    return (x * scale).clamp(-448, 448).to(E4M3).double() / scale.double()


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors that quantizers cast, without those cast by norms and activations."""
    shapes: list[tuple[int, ...]] = []

    def count(cast: Any) -> Any:
        def counting(self: Any, x: Tensor, **options: Any) -> Any:
            shapes.append(tuple(x.shape))
            return cast(self, x, **options)

        return counting

    for quantizer in (Delayed, Blockwise):
        monkeypatch.setattr(quantizer, "cast", count(quantizer.cast))
    return shapes


# ---- cast once ---------------------------------------------------------------------------------------------


@FP8_RECIPES
@LAYERS
def test_a_weight_is_cast_once_a_step(layer_type: type, recipe: Any, casts: list[tuple[int, ...]]) -> None:
    layer, tokens = layer_type(WIDTH, FFN), 2 * TOKENS
    weights = sorted(tuple(p.shape) for p in layer.parameters() if p.dim() == 2)
    for _ in range(2):
        for microbatch in range(4):
            casts.clear()
            with autocast(recipe=recipe):
                out = layer(torch.randn(tokens, WIDTH), is_first_microbatch=microbatch == 0)
            cast = sorted(shape for shape in casts if shape[0] != tokens)
            assert cast == (weights if microbatch == 0 else [])
            casts.clear()
            out.sum().backward()
            assert all(shape[0] == tokens for shape in casts), "a backward casts gradients only"
    for _ in range(2):
        casts.clear()
        with autocast(recipe=recipe):
            layer(torch.randn(tokens, WIDTH))
        assert sorted(shape for shape in casts if shape[0] != tokens) == weights


@FP8_RECIPES
def test_cached_weights_give_the_bits_of_weights_that_are_cast_each_time(recipe: Any) -> None:
    """This holds while neither weights nor scales change; delayed scaling's first update changes them."""
    cached, fresh = seeded(Stack), seeded(Stack)
    for model in (cached, fresh):
        with autocast(recipe=recipe):
            model(batch())
    for microbatch in range(4):
        x = batch(2.0**microbatch)
        results = []
        for model, first in ((cached, microbatch == 0), (fresh, None)):
            y = x.clone().requires_grad_()
            with autocast(recipe=recipe):
                out = model(y, first)
            out.square().mean().backward()
            results.append((out, y.grad, *(p.grad for p in model.parameters())))
        assert_equal(*results)


def test_a_cached_weight_of_an_evaluation_serves_training() -> None:
    """It was cast without the transpose, which a backward needs."""
    grads = []
    for evaluates_first in (False, True):
        layer, x = seeded(lambda: Linear(WIDTH, FFN)), torch.ones(TOKENS, WIDTH).requires_grad_()
        if evaluates_first:
            with torch.no_grad(), autocast(recipe=SHORT):
                layer(x, is_first_microbatch=True)
        with autocast(recipe=SHORT):
            out = layer(x, is_first_microbatch=not evaluates_first)
        out.square().sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert_equal(*grads)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cached_weights_in_an_evaluation(mode: Any) -> None:
    layer, x = Linear(WIDTH, FFN), batch()
    with mode():
        for first in (True, False, None):
            with autocast(recipe=SHORT):
                out = layer(x, is_first_microbatch=first)
            if first:
                expected = out
            assert torch.equal(out, expected)


def test_what_changes_the_weight_drops_the_cached_one() -> None:
    layer, x = Linear(WIDTH, FFN), batch()
    for change in (
        lambda: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
        lambda: layer.to(torch.float32),
    ):
        with autocast(recipe=SHORT):
            layer(x, is_first_microbatch=True)
        change()
        with autocast(recipe=SHORT), pytest.raises(RuntimeError, match="is_first_microbatch=True"):
            layer(x, is_first_microbatch=False)


# ---- never another scale -----------------------------------------------------------------------------------


def test_a_cached_weight_is_read_with_the_scale_of_its_cast() -> None:
    """Transformer Engine had this wrong (issue 1047): the error grows twenty-fold, unnoticed."""
    layer, other = Linear(WIDTH, FFN, bias=False), torch.randn(FFN, WIDTH)
    recipe = DelayedScaling(amax_compute_algo="most_recent")
    at_cast = torch.ones(())
    for factor in (20.0, 3000.0, 1e6):
        weight = torch.randn(FFN, WIDTH) * factor
        layer.weight.data = weight
        with autocast(recipe=recipe):
            layer(batch(), is_first_microbatch=True)
        for grows in range(3):
            layer.weight.data = other * factor * 1000.0**grows
            with autocast(recipe=recipe):
                layer(batch())  # moves the scale of weights
            layer.weight.data = weight
            assert layer.fp8_forward_scale[1] != at_cast
            scale, x = layer.fp8_forward_scale[0].clone(), batch().requires_grad_()
            with autocast(recipe=recipe):
                out = layer(x, is_first_microbatch=False)
            cached = fp8_of(weight, at_cast)
            assert error(out, fp8_of(x, scale) @ cached.t()) < 1e-6
            # Ones are exact in every format.
            (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert error(dx, torch.ones_like(out).double() @ cached) < 1e-6
        at_cast = layer.fp8_forward_scale[1].clone()


@LAYERS
@pytest.mark.parametrize("caches", [False, True], ids=["", "cached-weights"])
def test_scales_that_move_between_forward_and_backward(layer_type: type, caches: bool) -> None:
    """Gradients equal those without the updates, bit for bit."""
    grads = []
    for moves in (False, True):
        layer = seeded(lambda: layer_type(WIDTH, FFN))
        torch.manual_seed(1)
        x = batch().requires_grad_()
        with autocast(recipe=SHORT):
            layer(x, is_first_microbatch=True)
        with autocast(recipe=SHORT):
            out = layer(x, is_first_microbatch=False if caches else None)
        dy = torch.randn_like(out)
        before = layer.fp8_forward_scale.clone()
        for factor in (1e3, 1e6, 1e-3) if moves else ():
            with torch.no_grad():
                weights = [p.clone() for p in layer.parameters()]
                for p in layer.parameters():
                    p.data = p.data * factor
            with autocast(recipe=SHORT):
                layer(batch(factor))
            for p, weight in zip(layer.parameters(), weights, strict=True):
                p.data = weight
        assert torch.equal(layer.fp8_forward_scale, before) != moves
        out.backward(dy)
        grads.append((x.grad, *(p.grad for p in layer.parameters())))
    assert_equal(*grads)


def test_a_state_dict_that_is_loaded_between_forward_and_backward_does_not_matter() -> None:
    layer, x = Linear(WIDTH, FFN), batch().requires_grad_()
    with autocast(recipe=SHORT):
        layer(x)
    with autocast(recipe=SHORT):
        out = layer(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    state = copy.deepcopy(layer.state_dict())
    state["fp8_forward_scale"].mul_(2.0**10)
    state["fp8_backward_scale"].fill_(1)
    layer.load_state_dict(state)
    (again,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(dx, again)


@pytest.mark.parametrize("loads", [True, False], ids=["loaded", "written in place"])
def test_new_scales_are_used_by_the_next_cast(loads: bool) -> None:
    layer, x = Linear(WIDTH, FFN, bias=False), batch()
    with autocast(recipe=SHORT):
        layer(x)
    state = copy.deepcopy(layer.state_dict())
    scale = state["fp8_forward_scale"] if loads else layer.fp8_forward_scale
    scale.copy_(torch.tensor([4.0, 8.0]))
    if loads:
        layer.load_state_dict(state)
    with torch.no_grad(), autocast(recipe=SHORT):
        out = layer(x)
    exact = fp8_of(x, torch.tensor(4.0)) @ fp8_of(layer.weight, torch.tensor(8.0)).t()
    assert error(out, exact) < 1e-6


# ---- errors ------------------------------------------------------------------------------------------------


@FP8_RECIPES
@LAYERS
def test_false_before_any_true(layer_type: type, recipe: Any) -> None:
    layer = layer_type(WIDTH, FFN)
    with autocast(recipe=recipe):
        layer(batch())
        with pytest.raises(RuntimeError, match=rf"{layer_type.__name__}.*is_first_microbatch=True"):
            layer(batch(), is_first_microbatch=False)
    # Without FP8 there is nothing to keep.
    layer(batch(), is_first_microbatch=False)


def test_a_weight_that_was_cast_with_another_recipe() -> None:
    layer = Linear(WIDTH, FFN)
    with autocast(recipe=SHORT):
        layer(batch(), is_first_microbatch=True)
    for recipe in (CurrentScaling(), DelayedScaling(margin=5)):
        with autocast(recipe=recipe), pytest.raises(RuntimeError, match="another recipe"):
            layer(batch(), is_first_microbatch=False)


def test_layers_of_one_class_keep_their_own_weights() -> None:
    model = nn.Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH))
    x = batch()
    with autocast(recipe=CurrentScaling()):
        first = [layer(x, is_first_microbatch=True) for layer in model]
        second = [layer(x, is_first_microbatch=False) for layer in model]
    assert_equal(first, second)


def test_current_scaling_takes_the_scale_of_the_tensor_itself() -> None:
    layer, x = Linear(WIDTH, FFN, bias=False), batch(37.0)
    for power_of_two in (True, False):
        with torch.no_grad(), autocast(recipe=CurrentScaling(power_of_two_scales=power_of_two)):
            out = layer(x)
        scales = [torch.tensor(448.0) / t.abs().max() for t in (x, layer.weight)]
        if power_of_two:
            scales = [2.0 ** scale.log2().floor() for scale in scales]
        exact = fp8_of(x, scales[0]) @ fp8_of(layer.weight, scales[1]).t()
        assert error(out, exact) < 1e-6


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_current_scaling_of_almost_nothing(value: float) -> None:
    layer = Linear(WIDTH, FFN)
    x = torch.full((TOKENS, WIDTH), value).requires_grad_()
    with autocast(recipe=CurrentScaling()):
        out = layer(x)
    (0.0 * out).sum().backward()
    assert out.isfinite().all() and (x.grad == 0).all() and (layer.weight.grad == 0).all()


def test_quantizers_are_values() -> None:
    """One is made for each call of a layer: nothing may be shared with the next call."""
    a = Current(E4M3, 0.0, True).cast(batch(), rowwise=True, columnwise=False)
    b = Current(E4M3, 0.0, True).cast(batch(1e3), rowwise=True, columnwise=False)
    assert a.operand.rowwise_inv is not b.operand.rowwise_inv
    assert not torch.equal(a.operand.rowwise_inv, b.operand.rowwise_inv)
