"""Delayed scaling before the first update: tensors are cast with scales of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast, count_overflows
from flatfsdp.layers import Linear
from tests.support.fp8_layers import (
    FFN,
    SHORT,
    WIDTH,
    Stack,
    Trace,
    assert_same,
    assert_same_state,
    batch,
    fp8_state,
    seeded,
    snapshot,
    train,
)

TINY = 2.0**-24
"""A factor at which a scale of 1 leaves nothing of a gradient."""


def step(layer: torch.nn.Module, recipe: Any, x: Tensor, factor: float) -> list[Tensor]:
    """The output and all gradients of one step whose loss is multiplied by `factor`."""
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        out = layer(x)
    (out.square().mean() * factor).backward()
    assert x.grad is not None
    grads = [parameter.grad for parameter in layer.parameters()]
    assert all(grad is not None for grad in grads)
    return [out.detach(), x.grad, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("factor", [1.0, TINY])
def test_the_first_step_is_that_of_current_scaling(power_of_two: bool, factor: float) -> None:
    ours, theirs = seeded(Stack), seeded(Stack)
    x = batch()
    delayed = DelayedScaling(power_of_two_scales=power_of_two)
    found = step(ours, delayed, x, factor)
    expected = step(theirs, CurrentScaling(power_of_two_scales=power_of_two), x, factor)
    assert all(map(torch.equal, found, expected))
    assert all(grad.count_nonzero() > grad.numel() / 2 for grad in found[1:])
    later = zip(step(ours, delayed, 8 * x, 1.0), step(theirs, CurrentScaling(), 8 * x, 1.0), strict=True)
    assert not all(torch.equal(a, b) for a, b in later)


@pytest.mark.parametrize("margin", [2, -1])
def test_the_margin_is_that_of_later_scales(margin: float) -> None:
    """Input and weight are the same in both forwards, so their scales are, too."""
    recipe = DelayedScaling(margin=margin, power_of_two_scales=False)
    layer, x, outs = Linear(WIDTH, FFN), batch(), []
    for _ in range(2):
        with autocast(recipe=recipe):
            outs.append(layer(x))
    assert torch.equal(*outs)


def test_evaluations_before_training_leave_no_trace() -> None:
    evaluated, fresh = seeded(Stack), seeded(Stack)
    with torch.no_grad(), autocast(recipe=SHORT):
        small = evaluated(batch(TINY))
    assert small.isfinite().all()
    assert_same(train(evaluated), train(fresh))


def resumed(model: torch.nn.Module) -> torch.nn.Module:
    other = Stack()
    other.load_state_dict(snapshot(model))
    return other


def widened_and_back(model: torch.nn.Module) -> torch.nn.Module:
    return model.double().float()


@pytest.mark.parametrize("again", [copy.deepcopy, resumed, widened_and_back])
@pytest.mark.parametrize("before", ["nothing", "evaluated", "trained"])
def test_copies_and_resumed_models_go_on_alike(again: Any, before: str) -> None:
    def prepared() -> Stack:
        model: Stack = seeded(Stack)
        if before == "evaluated":
            with torch.no_grad(), autocast(recipe=SHORT):
                model(seeded(batch))
        elif before == "trained":
            train(model, factor=4.0)
        return model

    assert_same(train(again(prepared()), factor=TINY), train(prepared(), factor=TINY))


def test_a_first_step_in_two_recipes() -> None:
    """A recipe that is changed before the first update does not find scales either."""
    model, other = seeded(Stack), seeded(Stack)
    with torch.no_grad(), autocast(recipe=SHORT):
        model(batch())
    trace: Trace = train(model, recipe=DelayedScaling(amax_history_len=2))
    assert_same(trace, train(other, recipe=DelayedScaling(amax_history_len=2)))


def test_first_casts_overflow_only_at_infinity() -> None:
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer) as overflows:
        for large in (1e6, 1e9):
            with autocast(recipe=SHORT):
                out = layer(batch(large))
            out.sum().backward()
    # The second input exceeds what the scale of the first allows.
    assert overflows.table()[""]["input"] == {"amaxes": 2, "saturated": 1, "infinite": 0, "nan": 0}
    infinite = Linear(WIDTH, FFN)
    with count_overflows(infinite) as overflows, autocast(recipe=SHORT):
        x = batch()
        x[0, 0] = torch.inf
        infinite(x)
    assert overflows.table()[""]["input"] == {"amaxes": 1, "saturated": 1, "infinite": 1, "nan": 0}


def test_an_amax_of_zero_is_no_scale_of_infinity() -> None:
    """A tensor of zeros is cast with 1 and has the scale 1 until it has an amax."""
    layer, x = Linear(WIDTH, FFN), torch.zeros(32, WIDTH)
    for _ in range(2):
        with autocast(recipe=SHORT):
            out = layer(x.requires_grad_())
        out.backward(torch.zeros_like(out))
    state = fp8_state(layer)
    assert state["fp8_backward_scale"] == 1 and state["fp8_forward_scale"][0] == 1
    assert_same_state(state, {key: value for key, value in state.items() if value.isfinite().all()})
