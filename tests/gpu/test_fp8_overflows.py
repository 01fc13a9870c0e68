"""Counts of FP8 overflows on a GPU are right, and the host never waits for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe, autocast, count_overflows
from flatfsdp.layers import LayerNormMLP, Linear
from tests.support.gpu.marks import FP8_GEMMS
from tests.support.gpu.waiting import without_synchronisation

pytestmark = FP8_GEMMS
HIDDEN, FFN, TOKENS = 256, 512, 128
RECIPES = pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=4),
        CurrentScaling(),
        pytest.param(
            BlockScaling(),
            marks=pytest.mark.skipif(
                torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
                reason="block scaling is for Hopper",
            ),
        ),
    ],
    ids=["delayed", "current", "block"],
)


def build() -> nn.Module:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    return nn.Sequential(Linear(HIDDEN, HIDDEN, **options), LayerNormMLP(HIDDEN, FFN, **options))


def batches() -> list[Tensor]:
    """One batch in four forms: unchanged, a thousand times as large, with infinity, with NaN."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = [x, 1000 * x, x.clone(), x.clone()]
    found[2][3, 4], found[3][5, 6] = math.inf, math.nan
    return found


def step(model: nn.Module, recipe: Recipe, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the parameters' gradients."""
    with autocast(recipe=recipe):
        out = model(x)
    out.backward(dy)
    grads = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@RECIPES
def test_the_host_does_not_wait_and_bits_stay(recipe: Recipe) -> None:
    runs = []
    for counts in (False, True):
        model = build()
        xs, dy = batches(), torch.ones(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        with count_overflows(model):  # kernels are compiled, arenas made and merged
            for _ in range(2):
                step(model, recipe, xs[0], dy)
        torch.cuda.synchronize()
        if counts:
            with without_synchronisation(), count_overflows(model) as overflows:
                runs.append([tensor for x in xs for tensor in step(model, recipe, x, dy)])
        else:
            runs.append([tensor for x in xs for tensor in step(model, recipe, x, dy)])
    for ours, plain in zip(*runs, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0))
    table = overflows.table()
    jumps = int(isinstance(recipe, DelayedScaling))
    assert table["0"]["input"] == {"amaxes": 4, "saturated": 1 + jumps, "infinite": 1, "nan": 1}
    assert table["0"]["weight"] == {"amaxes": 4, "saturated": 0, "infinite": 0, "nan": 0}
    tensors = {f"{name}_{kind}" for name in ("fc1", "fc2") for kind in ("input", "weight", "grad_output")}
    assert set(table) == {"0", "1"} and set(table["1"]) == tensors
    # NaN propagates to later layers; infinity does not, and neither reaches this gradient.
    assert table["1"]["fc1_input"]["nan"] == table["1"]["fc2_input"]["nan"] == 1
    assert table["1"]["fc2_grad_output"] == {"amaxes": 4, "saturated": 0, "infinite": 0, "nan": 0}


def test_a_capture_inside_is_refused() -> None:
    model, recipe = build(), CurrentScaling()
    x, dy = batches()[0], torch.ones(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    step(model, recipe, x, dy)
    torch.cuda.synchronize()
    with count_overflows(model) as overflows:
        with (
            pytest.raises(RuntimeError, match=r"CUDA graph.*count_overflows"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step(model, recipe, x, dy)
        step(model, recipe, x, dy)
    assert overflows.totals() == {"amaxes": 9, "saturated": 0, "infinite": 0, "nan": 0}
