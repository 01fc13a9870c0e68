"""FP8 with lanes: scales are made once a step, so that any number of ranks has the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Lanes, Precision, microbatches
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import SHORT, counted_updates
from tests.support.fp8_training import batch, build
from tests.support.ranks import on_ranks, run_ranks

TOTAL, STEPS = 12, 4
MOST_RECENT = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")


def forward(model: Any, step: int, number: int) -> Tensor:
    x = batch(number, step, 2.0 ** (number % 5))
    return model(x, model.fsdp_state.shared.microbatch.is_first).square().mean() / TOTAL


def step_of(model: Any, step: int, recipe: Any, around: str) -> None:
    """Forwards and backwards of a step; the region is around each forward, each microbatch, or the step."""
    numbers = model.microbatch_numbers(TOTAL)
    with autocast(around == "step", recipe=recipe):
        for number in microbatches(model, numbers):
            with autocast(recipe=recipe):
                loss = forward(model, step, number)
                if around == "microbatch":
                    loss.backward()
            if around != "microbatch":
                loss.backward()


def trained(
    rank: int, world_size: int, recipe: Any, around: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Whole weights, and FP8 scales and histories, after some steps."""
    model = build(lanes=options.pop("lanes", Lanes(TOTAL)), **options)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for step in range(STEPS):
        step_of(model, step, recipe, around)
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {**model.state_dict(), **buffers}


def assert_equal_on_all_worlds(
    recipe: Any, around: str, worlds: tuple[int, ...], **options: Any
) -> dict[str, Tensor]:
    expected: dict[str, Tensor] = {}
    for world_size in worlds:
        for found in run_ranks(world_size, trained, recipe, around, dict(options)):
            expected = expected or found
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    return expected


@pytest.mark.parametrize("around", ["forward", "microbatch", "step"])
@pytest.mark.parametrize("recipe", [SHORT, MOST_RECENT], ids=["max", "most recent"])
def test_delayed_scaling(recipe: DelayedScaling, around: str) -> None:
    found = assert_equal_on_all_worlds(recipe, around, (1, 2, 3))
    histories = [buffer for name, buffer in found.items() if name.endswith("forward_amax_history")]
    # Row 0 is for the next step; each of the four steps has left one of the others, as far as there are any.
    assert histories
    for history in histories:
        assert not history[0].any() and (history[1:].count_nonzero(0) == min(STEPS, len(history) - 1)).all()


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["current", "block"])
def test_scaling_without_state(recipe: Any) -> None:
    assert_equal_on_all_worlds(recipe, "forward", (1, 2, 4), lanes=Lanes(4), flag=False)


def test_weights_stored_in_fp8() -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    assert_equal_on_all_worlds(SHORT, "forward", (1, 2, 4), lanes=Lanes(4), precision=precision)


@on_ranks(2)
def test_one_update_a_step_and_none_of_a_step_that_was_left() -> None:
    models = [build(lanes=4) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            if model is models[0]:
                leave(model)
            with counted_updates() as updates:
                step_of(model, step, SHORT, "forward")
            assert len(updates) == 1
            optimizer.step()
            optimizer.zero_grad()
    for (name, left), buffer in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(left, buffer), name


def leave(model: Any) -> None:
    """Runs the first microbatches of a step, with infinite gradients, and leaves the rest."""
    for count, number in enumerate(microbatches(model, model.microbatch_numbers(TOTAL))):
        if count == 2:
            break
        with autocast(recipe=SHORT):
            (torch.inf * forward(model, 9, number)).backward()
    for parameter in model.parameters():
        parameter.grad = None
