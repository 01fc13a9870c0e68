"""Recipes: effects of a change from one to another, and refused recipes, sizes and devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flatfsdp import fp8
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Format, SplitAccumulator, autocast
from flatfsdp.fp8 import delayed_scaling as state
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from flatfsdp.layers.checks import require_fp8
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import (
    FFN,
    FP8_RECIPES,
    MAKES,
    SHORT,
    TOKENS,
    WIDTH,
    Stack,
    batch,
    fp8_state,
    seeded,
)
from tests.support.plain_layers import error

RECIPES = pytest.mark.parametrize("recipe", [SHORT, CurrentScaling()], ids=["delayed", "current"])


# ---- another recipe ----------------------------------------------------------------------------------------


def test_a_changed_recipe_is_logged_once_and_works(caplog: pytest.LogCaptureFixture) -> None:
    model, x = seeded(Stack), batch()
    exact = model(x)
    # Recipes that no other test has, because logged messages are remembered.
    recipes = [
        DelayedScaling(amax_history_len=4, margin=1),
        DelayedScaling(amax_history_len=7, margin=1),
        CurrentScaling(amax_epsilon=1e-30),
        DelayedScaling(amax_history_len=3, margin=1, amax_compute_algo="most_recent"),
    ]
    with caplog.at_level(logging.WARNING, "flatfsdp"):
        for recipe in recipes:
            for _ in range(3):
                with autocast(recipe=recipe):
                    out = model(x)
                out.sum().backward()
            assert error(out, exact) < 0.1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3 and all("recipe changed" in message for message in messages)
    assert model.head.fp8_forward_amax_history.shape == (3, 2)


@pytest.mark.parametrize(("old", "new"), [(4, 9), (9, 4), (4, 1), (1, 4), (2, 2)])
def test_a_history_of_another_length_keeps_the_latest_updates(old: int, new: int) -> None:
    layer = Linear(WIDTH, FFN)
    for amax in range(1, 7):
        with autocast(recipe=DelayedScaling(amax_history_len=old, margin=2)):
            layer(torch.full((TOKENS, WIDTH), float(amax)))
    before = layer.fp8_forward_amax_history[:, 0].tolist()
    with autocast(recipe=DelayedScaling(amax_history_len=new, margin=3)):
        layer(torch.full((TOKENS, WIDTH), 7.0))
    kept = before[1:][1:] if old == new else before[1:]
    expected = [0.0, *([0.0] * new + kept + [7.0])[-(new - 1) :]] if new > 1 else [0.0]
    assert layer.fp8_forward_amax_history[:, 0].tolist() == expected


ONE_ROW = pytest.mark.xfail(strict=True, reason="a history of one row has nothing to rescale from")


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [pytest.param(1, marks=ONE_ROW), 2, 4])
def test_a_changed_format_changes_scales_at_once(algo: Any, length: int) -> None:
    """An E5M2 scale would saturate nearly all of an E4M3 gradient."""
    layer, x = Linear(WIDTH, FFN), batch().requires_grad_()
    for fp8_format in (Format.HYBRID, Format.HYBRID, Format.E4M3):
        x.grad = None
        with autocast(recipe=DelayedScaling(0, fp8_format, length, algo)):
            out = layer(x)
        dy = torch.randn_like(out)
        out.backward(dy)
    assert error(x.grad, dy @ layer.weight) < 0.08


def test_a_changed_margin_changes_scales_at_once() -> None:
    layer, x = Linear(WIDTH, FFN), batch()
    for margin in (0, 0, 3):
        with autocast(recipe=DelayedScaling(margin=margin, amax_history_len=4)):
            layer(x)
            scale = layer.fp8_forward_scale.clone()
        if margin == 0:
            before = layer.fp8_forward_scale.clone()
    assert torch.equal(scale, before / 8)


@pytest.mark.parametrize(
    "other",
    [
        DelayedScaling(amax_history_len=9),
        DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=4, split_accumulator=SplitAccumulator(fprop=True)),
    ],
    ids=["length", "algo", "split"],
)
def test_what_does_not_concern_the_scale_of_now_leaves_it(other: Any) -> None:
    """The oldest row, 100, counted in the last update and is gone now."""
    layer = Linear(WIDTH, FFN)
    for amax in (100.0, 1.0, 1.0, 1.0):
        with autocast(recipe=SHORT):
            layer(torch.full((TOKENS, WIDTH), amax))
    assert layer.fp8_forward_scale[0] == 4
    with torch.no_grad(), autocast(recipe=other):
        layer(torch.full((TOKENS, WIDTH), 1.0))
    assert layer.fp8_forward_scale[0] == 4


def test_a_forward_keeps_its_recipe_for_its_backward() -> None:
    """Another recipe is used in between, as in an evaluation with gradients."""
    layer, other, x = seeded(lambda: Linear(WIDTH, FFN)), seeded(lambda: Linear(WIDTH, FFN)), batch()
    grads = []
    for each in (layer, other):
        y = x.clone().requires_grad_()
        with autocast(recipe=SHORT):
            out = each(y)
        if each is layer:
            with autocast(recipe=DelayedScaling(fp8_format=Format.E4M3, amax_history_len=8)):
                each(batch(100.0))
        out.backward(torch.ones_like(out))
        grads.append((y.grad, each.weight.grad, each.bias.grad))
    assert_equal(*grads)
    with autocast(recipe=SHORT):
        out = layer(x)
    out.sum().backward()


# ---- what they, and FP8, do not take -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(margin="1"), "margin"),
        (lambda: DelayedScaling(margin=float("inf")), "margin"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len"),
        (lambda: DelayedScaling(amax_history_len=2.0), "amax_history_len"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo"),
        (lambda: DelayedScaling(fp8_format="HYBRID"), "fp8_format"),
        (lambda: DelayedScaling(reduce_amax=1), "reduce_amax"),
        (lambda: DelayedScaling(power_of_two_scales=None), "power_of_two_scales"),
        (lambda: DelayedScaling(split_accumulator=True), "split_accumulator"),
        (lambda: CurrentScaling(fp8_format=None), "fp8_format"),
        (lambda: CurrentScaling(amax_epsilon=-1.0), "amax_epsilon"),
        (lambda: CurrentScaling(amax_epsilon=float("nan")), "amax_epsilon"),
        (lambda: CurrentScaling(amax_epsilon="0"), "amax_epsilon"),
        (lambda: CurrentScaling(power_of_two_scales="no"), "power_of_two_scales"),
        (lambda: fp8.BlockScaling(fp8_format=Format.HYBRID), "fp8_format"),
        (lambda: fp8.BlockScaling(split_accumulator=SplitAccumulator()), "split"),
        (lambda: fp8.BlockScaling(split_accumulator=True), "split_accumulator"),
        (lambda: SplitAccumulator(dgrad=0), "dgrad"),
    ],
)
def test_values_that_no_recipe_has(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_something_else_than_a_recipe() -> None:
    with pytest.raises(TypeError, match="DelayedScaling"), autocast(recipe="delayed"):
        pass
    with pytest.raises(TypeError, match="DelayedScaling"), autocast(recipe=DelayedScaling):
        pass


@pytest.mark.parametrize("region", [autocast, fp8.fp8_autocast])
def test_a_recipe_where_a_switch_belongs(region: Any) -> None:
    """It would count as True, and another recipe would be used."""
    with pytest.raises(TypeError, match=r"enabled is CurrentScaling.*recipe="), region(CurrentScaling()):
        pass
    with pytest.raises(TypeError, match=r"calibrating is CurrentScaling"), region(True, CurrentScaling()):
        pass


@pytest.mark.parametrize(
    ("layer", "shape", "name"),
    [
        (lambda: Linear(WIDTH + 8, FFN), (TOKENS, WIDTH + 8), "in_features is 40"),
        (lambda: Linear(WIDTH, FFN + 1), (TOKENS, WIDTH), "out_features is 49"),
        (lambda: LayerNormLinear(WIDTH, FFN + 4), (TOKENS, WIDTH), "out_features is 52"),
        (lambda: LayerNormMLP(WIDTH, 24), (TOKENS, WIDTH), "fc1_weight: out_features is 24"),
        (lambda: LayerNormMLP(WIDTH, 24, activation="swiglu"), (TOKENS, WIDTH), "fc2_weight: in_features"),
    ],
)
@RECIPES
def test_sizes_that_fp8_does_not_take(layer: Any, shape: tuple[int, int], name: str, recipe: Any) -> None:
    layer, x = layer(), torch.randn(shape)
    with autocast(recipe=recipe), pytest.raises(ValueError, match=rf"{type(layer).__name__}.*{name}"):
        layer(x)
    assert layer(x).shape[0] == shape[0]


def test_tokens_are_the_product_of_leading_dimensions() -> None:
    layer = Linear(WIDTH, FFN)
    with autocast():
        assert layer(torch.randn(2, 4, 4, WIDTH)).shape == (2, 4, 4, FFN)


@MAKES
@FP8_RECIPES
def test_any_number_of_tokens_is_that_of_the_last_one_repeated(make: Any, recipe: Any) -> None:
    """Outputs, gradients and amaxes are bit-equal: added rows have no gradient and no new amax."""
    results = []
    for repeats in (False, True):
        layer = seeded(make)
        x = batch()[:21].requires_grad_()
        rows = torch.cat([x, x[-1:].expand(11, -1)]) if repeats else x
        with autocast(recipe=recipe):
            out = layer(rows)[:21]
        out.square().sum().backward()
        assert x.grad is not None
        results.append([out, x.grad, *(p.grad for p in layer.parameters()), *fp8_state(layer).values()])
    assert_equal(*results)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], torch.device]]:
    """Makes a simulated GPU with a compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Other")

    def of(*capability: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        require_fp8.cache_clear()
        return torch.device("cuda", 0)

    yield of
    require_fp8.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
def test_a_gpu_without_fp8(gpu: Any, capability: tuple[int, int]) -> None:
    device = gpu(*capability)
    for by_block in (False, True):
        if capability < (8, 9):
            with pytest.raises(RuntimeError, match=r"NVIDIA Other.*autocast\(enabled=False\)"):
                require_fp8(device, by_block)
        elif by_block and capability != (9, 0):
            with pytest.raises(RuntimeError, match=r"BlockScaling.*NVIDIA Other.*CurrentScaling"):
                require_fp8(device, by_block)
        else:
            require_fp8(device, by_block)


@pytest.mark.parametrize("recipe", [SHORT, CurrentScaling(), fp8.BlockScaling()], ids=type)
def test_layers_ask_for_what_their_recipe_needs(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("flatfsdp.layers.base.require_fp8", lambda *arguments: asked.append(arguments))
    with autocast(recipe=recipe):
        Linear(WIDTH, FFN)(batch())
    assert asked == [(torch.device("cpu"), isinstance(recipe, fp8.BlockScaling))]


def test_delayed_scaling_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would read the scales of its capture: an evaluation's may stay, a training's may not."""
    layer, x = Linear(WIDTH, FFN), batch()
    with autocast(recipe=SHORT):
        out = layer(x)
    monkeypatch.setattr(state, "is_captured", lambda device: True)
    with pytest.raises(RuntimeError, match=r"CUDA graph.*CurrentScaling"), autocast(recipe=SHORT):
        layer(x)
    with pytest.raises(RuntimeError, match=r"CUDA graph.*CurrentScaling"):
        out.sum().backward()
    with torch.no_grad(), autocast(recipe=SHORT):
        layer(x)
    with autocast(recipe=CurrentScaling()):
        layer(x).sum().backward()
