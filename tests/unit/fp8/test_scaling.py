"""Delayed scaling: histories and scales, number by number, against a plain-Python model of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Format, autocast
from flatfsdp.layers import LayerNormMLP, Linear
from tests.support.fp8_layers import FFN, TOKENS, WIDTH, Stack, counted_updates, fp8_state, same_bits, seeded

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
FLT_MAX = torch.finfo(torch.float32).max
TINY = 2.0**-140
"""A denormal number, whose scale overflows FP32."""


class OneTensor:
    """History and scale of one tensor, step by step in FP32."""

    def __init__(self, fp8_max: float, recipe: DelayedScaling) -> None:
        self.fp8_max, self.recipe = np.float32(fp8_max), recipe
        self.history = [np.float32(0)] * recipe.amax_history_len
        self.scale = np.float32(1)

    def update(self, amax: float) -> None:
        latest = np.float32(amax)
        if latest == 0:
            return
        known = [latest, *self.history[1:]]
        if self.recipe.amax_compute_algo == "most_recent":
            largest = latest
        else:
            largest = np.float32(np.nan) if any(map(np.isnan, known)) else max(known)
        self.history = ([np.float32(0), *self.history[2:], latest])[: self.recipe.amax_history_len]
        if not (largest > 0 and np.isfinite(largest)):
            return
        with np.errstate(over="ignore"):
            scale = self.fp8_max / largest * np.float32(2.0**-self.recipe.margin)
        scale = min(scale, np.float32(FLT_MAX))
        if self.recipe.power_of_two_scales:
            scale = np.float32(2.0 ** (math.frexp(scale)[1] - 1))
        self.scale = scale

    def assert_is(self, scale: Tensor, history: Tensor) -> None:
        assert same_bits(history, torch.from_numpy(np.array(self.history)))
        assert same_bits(scale, torch.tensor(float(self.scale)))


def step(layer: Linear, recipe: DelayedScaling, x: float, dy: float) -> None:
    """Runs forward and backward on matrices whose largest magnitudes are x and dy."""
    x_matrix, dy_matrix = torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, FFN)
    x_matrix[3, 5], dy_matrix[7, 2] = -x, dy
    with autocast(recipe=recipe):
        out = layer(x_matrix.requires_grad_())
    out.backward(dy_matrix)


def columns(layer: Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Scale and history of input, weight and gradient."""
    for direction in ("forward", "backward"):
        scale, history = (getattr(layer, f"fp8_{direction}_{key}") for key in ("scale", "amax_history"))
        yield from zip(scale, history.T, strict=True)


AMAXES = [3.5, 0.0, TINY, 7.25, math.inf, 1e-3, math.nan, 2.0, 0.3, 0.7, 5e4, 1.0, 1.0]


@pytest.mark.parametrize("fp8_format", Format)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("margin", "power_of_two"), [(0, True), (0, False), (3, True), (-1, False)])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_histories_and_scales(
    fp8_format: Format, algo: str, margin: int, power_of_two: bool, length: int
) -> None:
    recipe = DelayedScaling(margin, fp8_format, length, algo, power_of_two_scales=power_of_two)
    layer = Linear(WIDTH, FFN, bias=False)
    weight = layer.weight.abs().max().item()
    grad_max = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}[fp8_format.backward]
    expected = [OneTensor(limit, recipe) for limit in (E4M3_MAX, E4M3_MAX, grad_max)]
    for x, dy in zip(AMAXES, reversed(AMAXES), strict=True):
        step(layer, recipe, x, dy)
        for tensor, amax in zip(expected, (x, weight, dy), strict=True):
            tensor.update(amax)
        for tensor, (scale, history) in zip(expected, columns(layer), strict=True):
            tensor.assert_is(scale, history)


def test_a_tiny_amax_gives_the_largest_scale() -> None:
    layer = Linear(WIDTH, FFN)
    step(layer, DelayedScaling(power_of_two_scales=False), TINY, TINY)
    assert layer.fp8_forward_scale[0] == layer.fp8_backward_scale == FLT_MAX
    # A cast with it saturates, and nothing becomes NaN.
    with autocast(recipe=DelayedScaling(power_of_two_scales=False)):
        assert layer(torch.ones(TOKENS, WIDTH)).isfinite().all()


@pytest.mark.parametrize("length", [31, 1024])
def test_a_long_history_forgets_after_its_length(length: int) -> None:
    recipe, layer = DelayedScaling(amax_history_len=length), Linear(WIDTH, FFN)
    step(layer, recipe, 100.0, 100.0)
    for _ in range(length - 1):
        step(layer, recipe, 1.0, 1.0)
        assert layer.fp8_forward_scale[0] == 4 and layer.fp8_backward_scale == 512
    history = layer.fp8_forward_amax_history
    assert history.shape == (length, 2) and history[0, 0] == 0 and (history[2:, 0] == 1).all()
    step(layer, recipe, 1.0, 1.0)
    assert layer.fp8_forward_scale[0] == 256 and layer.fp8_backward_scale == 32768


def test_several_microbatches_are_several_updates_and_casts_in_one_region_are_one() -> None:
    recipe, layer = DelayedScaling(amax_history_len=4), Linear(WIDTH, FFN)
    with autocast(recipe=recipe):
        for amax in (1.0, 4.0, 2.0):
            layer(torch.full((TOKENS, WIDTH), amax))
    assert layer.fp8_forward_amax_history[:, 0].tolist() == [0, 0, 0, 4]
    for amax in (1.0, 2.0):
        with autocast(recipe=recipe):
            layer(torch.full((TOKENS, WIDTH), amax))
    assert layer.fp8_forward_amax_history[:, 0].tolist() == [0, 4, 1, 2]


@pytest.mark.parametrize("mlp", [False, True], ids=["linear", "mlp"])
def test_a_cached_weight_neither_rolls_nor_rescales(mlp: bool) -> None:
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    layer = LayerNormMLP(WIDTH, FFN) if mlp else Linear(WIDTH, FFN)
    x = torch.randn(TOKENS, WIDTH)
    for _ in range(2):
        with autocast(recipe=recipe):
            layer(x, is_first_microbatch=True)
    scales, histories = (getattr(layer, f"fp8_forward_{key}") for key in ("scale", "amax_history"))
    scale, history = scales.clone(), histories.clone()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" not in name:
                parameter *= 64
    for _ in range(3):
        with autocast(recipe=recipe):
            layer(64 * x, is_first_microbatch=False)
    weights = slice(1, None, 2)
    assert torch.equal(scales[weights], scale[weights])
    assert torch.equal(histories[:, weights], history[:, weights])
    assert not (histories[:, ::2] == history[:, ::2]).all(0).any()
    with autocast(recipe=recipe):
        layer(x, is_first_microbatch=True)
    assert torch.equal(scales[weights] * 64, scale[weights])


def test_a_cached_weight_does_not_rescale_when_its_largest_amax_is_forgotten() -> None:
    recipe, layer = DelayedScaling(amax_history_len=4), Linear(WIDTH, FFN)
    for amax in (100.0, 1.0, 1.0, 1.0):
        layer.weight.data.fill_(amax)
        with autocast(recipe=recipe):
            layer(torch.ones(TOKENS, WIDTH), is_first_microbatch=True)
    assert layer.fp8_forward_scale[1] == 4
    for first, scale in ((False, 4), (False, 4), (True, 256)):
        with autocast(recipe=recipe):
            layer(torch.ones(TOKENS, WIDTH), is_first_microbatch=first)
        assert layer.fp8_forward_scale[1] == scale


def test_every_tensor_of_an_mlp_has_its_own_scale() -> None:
    recipe = DelayedScaling(power_of_two_scales=False)
    layer = LayerNormMLP(WIDTH, FFN, activation="relu", bias=False)
    with autocast(recipe=recipe):
        out = layer(torch.randn(TOKENS, WIDTH))
    dy = torch.randn_like(out)
    out.backward(dy)
    scales = layer.fp8_forward_scale
    assert scales.shape == (4,) and layer.fp8_backward_scale.shape == (2,)
    for index, weight in ((1, layer.fc1_weight), (3, layer.fc2_weight)):
        assert scales[index] == torch.tensor(E4M3_MAX) / weight.abs().max()
    # Gradients are in the order of the maps.
    assert layer.fp8_backward_scale[1] == torch.tensor(E5M2_MAX) / dy.abs().max()
    assert len({*scales.tolist(), *layer.fp8_backward_scale.tolist()}) == 6


def test_a_whole_model_is_updated_at_once() -> None:
    model, x = seeded(Stack), torch.randn(TOKENS, WIDTH)
    with counted_updates() as counts:
        for _ in range(3):
            with autocast():
                out = model(x)
            out.sum().backward()
    forward, backward = 2 * (2 + 2 + 4) + 2, 2 * (1 + 1 + 2) + 1
    assert counts == [forward, backward] * 3


def test_state_is_fp32_whatever_the_default_dtype() -> None:
    """This also holds when it is loaded into a layer that has not run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = Linear(WIDTH, FFN)
        for recipe in (DelayedScaling(), CurrentScaling()):
            with autocast(recipe=recipe):
                out = layer(torch.randn(TOKENS, WIDTH))
            out.sum().backward()
        fresh = Linear(WIDTH, FFN)
        fresh.load_state_dict(layer.state_dict())
    finally:
        torch.set_default_dtype(before)
    for state in (fp8_state(layer), fp8_state(fresh)):
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
