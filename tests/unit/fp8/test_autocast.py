"""Regions: when FP8 is on, what they record, and that models are independent of each other."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Format, autocast, fp8_autocast
from flatfsdp.layers import Linear
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import (
    FFN,
    SHORT,
    TOKENS,
    WIDTH,
    Stack,
    assert_same,
    assert_same_state,
    batch,
    counted_updates,
    fp8_state,
    seeded,
    snapshot,
    train,
)
from tests.support.plain_layers import error

RECIPES = pytest.mark.parametrize("recipe", [SHORT, CurrentScaling()], ids=["delayed", "current"])


def fail_after(model: nn.Module, x: torch.Tensor) -> None:
    """Raises between a forward and the end of its region."""

    def fail(*_: Any) -> None:
        raise KeyError

    handle = model.register_forward_hook(fail)
    with pytest.raises(KeyError), autocast(recipe=SHORT):
        model(x)
    handle.remove()


# ---- on and off --------------------------------------------------------------------------------------------


@RECIPES
def test_fp8_is_on_inside_only(recipe: Any) -> None:
    layer, x = Linear(WIDTH, FFN), batch()
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)
    with autocast(recipe=recipe):
        inside = layer(x)
        with autocast(enabled=False, recipe=recipe):
            assert torch.equal(layer(x), plain)
        with autocast(enabled=False), autocast(recipe=recipe):
            assert not torch.equal(layer(x), plain)
    # The name that it had in earlier versions of Transformer Engine.
    for enabled in (False, True):
        with fp8_autocast(enabled=enabled, fp8_recipe=recipe):
            assert torch.equal(layer(x), plain) != enabled
    assert torch.equal(layer(x), plain)
    assert 0 < error(inside, plain) < 0.08


def test_defaults_are_delayed_scaling() -> None:
    layer = Linear(WIDTH, FFN)
    with autocast():
        layer(batch())
    assert layer.fp8_forward_amax_history.shape == (1024, 2)


def test_without_fp8_a_layer_has_no_state() -> None:
    layer = Linear(WIDTH, FFN)
    layer(batch()).sum().backward()
    with autocast(recipe=CurrentScaling()):
        layer(batch()).sum().backward()
    assert list(layer.state_dict()) == ["weight", "bias"]


# ---- when scales are updated -------------------------------------------------------------------------------


def test_nested_regions_are_one_update() -> None:
    flat, nested, x = seeded(Stack), seeded(Stack), batch()
    with counted_updates() as counts:
        for _ in range(3):
            with autocast(recipe=SHORT):
                expected = flat(x)
        assert len(counts) == 3
        nested.call = nested_call
        for _ in range(3):
            with autocast(recipe=SHORT):
                assert len(counts) in (3, 4, 5)
                out = nested(x)
    assert len(counts) == 6
    assert torch.equal(out, expected)
    assert_same_state(snapshot(flat), snapshot(nested))


def nested_call(block: nn.Module, *args: Any) -> torch.Tensor:
    with autocast(recipe=SHORT), autocast(recipe=SHORT):
        return block(*args)


def test_layers_only_of_inner_regions_are_updated_at_the_end_of_the_outermost() -> None:
    layer = Linear(WIDTH, FFN)
    with autocast(enabled=False):
        for _ in range(2):
            with autocast(recipe=SHORT):
                layer(batch())
        assert (layer.fp8_forward_amax_history[1:] == 0).all()
    assert (layer.fp8_forward_amax_history[-1] > 0).all()
    assert (layer.fp8_forward_amax_history[:-1] == 0).all()


def test_backward_updates_once_at_its_end_inside_a_region_or_outside() -> None:
    inside, outside, x = seeded(Stack), seeded(Stack), batch()
    for _ in range(3):
        with counted_updates() as counts:
            with autocast(recipe=SHORT):
                outside(x).square().mean().backward()
            assert len(counts) == 2
            with autocast(recipe=SHORT):
                loss = inside(x).square().mean()
            loss.backward()
            assert len(counts) == 4
    assert_same_state(snapshot(inside), snapshot(outside))


def test_gradients_are_cast_with_the_scales_of_the_last_backward() -> None:
    """All casts of one backward use one generation, whatever the order of layers in it."""
    layer, x = Linear(WIDTH, WIDTH), batch()
    with autocast(recipe=SHORT):
        layer(x).sum().backward()
    before = layer.fp8_backward_scale.clone()
    seen = []
    with autocast(recipe=SHORT):
        out = layer(layer(layer(x)))
    out.register_hook(lambda _: seen.append(layer.fp8_backward_scale.clone()))
    layer.weight.register_hook(lambda _: seen.append(layer.fp8_backward_scale.clone()))
    out.backward(torch.full_like(out, 1000.0))
    assert len(seen) == 2 and all(torch.equal(scale, before) for scale in seen)
    assert not torch.equal(layer.fp8_backward_scale, before)


@pytest.mark.xfail(strict=True, reason="one update for each region")
def test_a_backward_through_two_regions_updates_once() -> None:
    layer = Linear(WIDTH, FFN)
    outs = []
    for _ in range(2):
        with autocast(recipe=SHORT):
            outs.append(layer(batch()))
    with counted_updates() as counts:
        (outs[0] + outs[1]).sum().backward()
    assert counts == [1]


def test_a_backward_through_two_regions_is_one_update() -> None:
    results = []
    for regions in (1, 2):
        layer = Linear(WIDTH, FFN)
        for amax in (100.0, 1.0, 1.0, 1.0):
            out = 0
            for _ in range(regions):
                with autocast(recipe=SHORT):
                    out = out + layer(torch.ones(TOKENS, WIDTH))
            out.backward(torch.full_like(out, amax))
        results.append([layer.fp8_backward_scale.item(), *layer.fp8_backward_amax_history[:, 0].tolist()])
    assert results == [[512.0, 0.0, 1.0, 1.0, 1.0]] * 2


def test_a_backward_that_fails_updates_nothing_and_the_next_one_does() -> None:
    model, x = seeded(Stack), batch()
    for _ in range(2):
        with autocast(recipe=SHORT):
            out = model(x)
        out.sum().backward()

    def fail(_grad: torch.Tensor) -> None:
        raise KeyError

    with autocast(recipe=SHORT):
        out = model(x)
    before = {k: v for k, v in fp8_state(model).items() if "backward_scale" in k}
    handle = model.blocks[0].up.layer_norm_weight.register_hook(fail)
    with pytest.raises(KeyError):
        out.sum().backward()
    handle.remove()
    assert all(torch.equal(fp8_state(model)[key], value) for key, value in before.items())
    with autocast(recipe=SHORT):
        out = model(x)
    with counted_updates() as counts:
        out.sum().backward()
    assert len(counts) == 1
    histories = [v for k, v in fp8_state(model).items() if "backward_amax" in k]
    assert all((history[1:] != 0).all() for history in histories)


# ---- what is not recorded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize(
    "recipe",
    [
        SHORT,
        DelayedScaling(amax_history_len=8),
        DelayedScaling(margin=2),
        DelayedScaling(fp8_format=Format.E4M3),
    ],
    ids=["same", "longer", "margin", "format"],
)
def test_nothing_is_recorded_without_gradients(mode: Any, evaluates: bool, recipe: DelayedScaling) -> None:
    model = seeded(Stack)
    train(model)
    before = snapshot(model)
    model.train(not evaluates)
    with mode(), counted_updates() as counts, autocast(recipe=recipe):
        model(batch(100.0))
    assert counts == []
    assert_same_state(snapshot(model), before)


def test_a_model_that_is_first_evaluated_in_inference_mode_trains_like_any_other() -> None:
    model, other, x = seeded(Stack), seeded(Stack), batch()
    with torch.inference_mode(), autocast(recipe=SHORT):
        model(x)
    with torch.no_grad(), autocast(recipe=SHORT):
        other(x)
    assert_same(train(model), train(other))
    copy.deepcopy(model)


def test_a_recipe_that_is_first_used_in_inference_mode() -> None:
    model, other, x = seeded(Stack), seeded(Stack), batch()
    recipe = DelayedScaling(amax_history_len=6)
    for each, mode in ((model, torch.inference_mode), (other, torch.no_grad)):
        train(each)
        with mode(), autocast(recipe=recipe):
            each(x)
    assert_same(train(model, recipe=recipe), train(other, recipe=recipe))


def test_an_exception_in_a_region_updates_nothing() -> None:
    model = seeded(Stack)
    with autocast(recipe=SHORT):
        model(batch())
    before = fp8_state(model)
    with counted_updates() as counts:
        fail_after(model, batch(100.0))
        with autocast(recipe=SHORT), pytest.raises(ValueError, match="last dimension"):
            model.blocks[0](torch.randn(TOKENS, WIDTH + 16))
    assert counts == []
    for key, value in fp8_state(model).items():
        kept = slice(1, None) if "history" in key else slice(None)
        assert torch.equal(value[kept], before[key][kept]), key


def test_what_a_failed_forward_saw_is_not_in_the_next_update() -> None:
    layer = Linear(WIDTH, FFN)
    fail_after(layer, batch() * torch.nan)
    with autocast(recipe=SHORT):
        layer(torch.ones(TOKENS, WIDTH))
    assert layer.fp8_forward_amax_history[-1, 0] == 1


def test_an_exception_that_is_caught_inside_the_outermost_region_ends_nothing() -> None:
    outer, inner, x = Linear(WIDTH, FFN), Linear(WIDTH, FFN), batch()
    with autocast(recipe=SHORT):
        outer(x)
        fail_after(inner, x)
    for layer in (outer, inner):
        assert layer.fp8_forward_amax_history[-1, 0] == x.abs().max()


# ---- calibrating -------------------------------------------------------------------------------------------


def test_calibrating_records_the_amaxes_and_computes_without_fp8() -> None:
    model, plain, x = seeded(Stack), seeded(Stack), batch(3.0)
    with autocast(enabled=False, calibrating=True, recipe=SHORT):
        out = model(x)
    expected = plain(x)
    ours, theirs = torch.autograd.grad(out.sum(), [*model.parameters()]), [*plain.parameters()]
    assert_equal([out, *ours], [expected, *torch.autograd.grad(expected.sum(), theirs)])
    with autocast(recipe=SHORT):
        plain(x)
    for key, value in fp8_state(plain).items():
        if key.endswith("forward_scale"):
            ratio = dict(model.state_dict())[key] / value
            # FP8 changes the activations a little, and with them their amaxes.
            assert ((ratio >= 0.5) & (ratio <= 2)).all()
    head = model.head
    assert head.fp8_forward_amax_history[-1, 1] == head.weight.abs().max()
    assert "fp8_backward_scale" not in model.state_dict() or head.fp8_backward_scale == 1


def test_calibration_gives_the_scales_of_the_first_step() -> None:
    layer, x = Linear(WIDTH, FFN), batch(2000.0)
    uncalibrated = copy.deepcopy(layer)
    with autocast(enabled=False, calibrating=True):
        layer(x)
    for larger in (1, 1000):
        exact = nn.functional.linear(larger * x, layer.weight, layer.bias)
        with torch.no_grad(), autocast():
            # The calibrated scale saturates what is larger; without one, casts take the tensor's own.
            assert (error(layer(larger * x), exact) < 0.05) == (larger == 1)
            assert error(uncalibrated(larger * x), exact) < 0.05


# ---- models beside each other ------------------------------------------------------------------------------


def test_models_do_not_see_each_other() -> None:
    alone = [train(seeded(Stack, seed), seed=10 + seed) for seed in (0, 1)]
    models = [seeded(Stack, seed) for seed in (0, 1)]
    # One autocast region around both, so that they share an arena afterwards.
    for model in models:
        with torch.no_grad(), autocast(recipe=SHORT):
            model(batch())
    interleaved = [train(model, seed=10 + seed) for seed, model in enumerate(models)]
    for a, b in zip(alone, interleaved, strict=True):
        assert_same(a, b)


def test_models_that_shared_a_region_train_on_as_alone() -> None:
    a, b = seeded(Stack, 0), seeded(Stack, 1)
    xs = [batch(), batch(3.0)]
    with autocast(recipe=SHORT):
        together = a(xs[0]).square().mean() + b(xs[1]).square().mean()
    together.backward()
    c, d = seeded(Stack, 0), seeded(Stack, 1)
    for model, x in ((c, xs[0]), (d, xs[1])):
        with autocast(recipe=SHORT):
            loss = model(x).square().mean()
        loss.backward()
    for ours, other in ((a, c), (b, d)):
        assert_same_state(snapshot(ours), snapshot(other))
        ours.zero_grad()
        other.zero_grad()
    for ours, other in ((a, c), (b, d), (a, c)):
        assert_same(train(ours, seed=5), train(other, seed=5))


def test_updates_for_another_model_are_none() -> None:
    """The largest amax has just left the history; an update without new amaxes would notice too early."""
    scales = []
    for others in (0, 3):
        model, other = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        with autocast(recipe=SHORT):
            out = model(torch.zeros(TOKENS, WIDTH)) + other(torch.zeros(TOKENS, WIDTH))
        (0 * out).sum().backward()
        for amax in (100.0, 1.0, 1.0, 1.0):
            with autocast(recipe=SHORT):
                out = model(torch.full((TOKENS, WIDTH), amax))
            out.backward(torch.full_like(out, amax))
        for _ in range(others):
            with autocast(recipe=SHORT):
                out = other(torch.ones(TOKENS, WIDTH))
            out.sum().backward()
        scales.append([model.fp8_forward_scale[0].item(), model.fp8_backward_scale.item()])
    assert scales == [[4.0, 512.0]] * 2


def test_changing_subsets_of_layers_keep_their_own_histories() -> None:
    """Each step uses other layers; each must end up as if it had been used alone."""
    layers = [seeded(lambda: Linear(WIDTH, WIDTH), seed) for seed in range(4)]
    alone = [seeded(lambda: Linear(WIDTH, WIDTH), seed) for seed in range(4)]
    for subset in ((0, 1), (1, 2), (0,), (0, 1, 2, 3), (3,), (1, 3)):
        x = batch(2.0 ** len(subset))
        with autocast(recipe=SHORT):
            out = sum(layers[i](x) for i in subset)
        out.square().sum().backward()
        for i in subset:
            with autocast(recipe=SHORT):
                y = alone[i](x)
            y.backward(2 * out.detach())
    for ours, other in zip(layers, alone, strict=True):
        assert_same_state(snapshot(ours), snapshot(other))


def test_a_layer_used_twice_records_the_larger_amax() -> None:
    layer = Linear(WIDTH, WIDTH, bias=False)
    with autocast(recipe=SHORT):
        out = layer(torch.full((TOKENS, WIDTH), 2.0)) + layer(torch.full((TOKENS, WIDTH), -5.0))
    out.sum().backward()
    assert layer.fp8_forward_amax_history[:, 0].tolist() == [0, 0, 0, 5]
    assert layer.fp8_backward_amax_history[:, 0].tolist() == [0, 0, 0, 1]


# ---- models without layers for it ------------------------------------------------------------------------


def test_a_model_in_which_nothing_can_be_cast_warns_once() -> None:
    from flatfsdp.layers import convert

    plain, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), batch()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            with autocast(recipe=SHORT), autocast(recipe=SHORT):
                plain(x)
    (warning,) = found
    assert "convert its nn.Linear" in str(warning.message) and warning.filename == __file__
    convert(plain, fp8=False, filter=lambda *_: True)
    with pytest.warns(UserWarning, match="nothing in this fp8.autocast can compute in FP8"):
        with autocast():
            plain(x)


def test_a_model_that_can_be_cast_warns_of_nothing() -> None:
    """Nor does one that is told not to, nor a region that fails before its layers."""
    layer, x = Linear(WIDTH, FFN), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recipe in (SHORT, CurrentScaling()):
            with autocast(recipe=recipe), autocast(recipe=recipe):
                layer(x)
            with autocast(recipe=recipe), autocast(enabled=False):
                layer(x)
            with autocast(recipe=recipe), torch.inference_mode():
                layer.eval()(x)
            layer.train()
        with autocast(enabled=False):
            nn.Linear(2, 2)(torch.ones(2, 2))
        with pytest.raises(KeyError), autocast():
            raise KeyError
