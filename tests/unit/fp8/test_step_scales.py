"""Scales of delayed scaling after a skipped step equal those before it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import by_class, checkpoint, fp8, microbatches, shard
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.optim import SGD, AdamW, NonFiniteGradientError
from tests.support.fp8_layers import SHORT, TOKENS, WIDTH, Block, Stack, assert_same_state, fp8_state, seeded
from tests.support.models import same

MODES = pytest.mark.parametrize("mode", ["skip", "raise"])


def wrapped(**options: Any) -> Any:
    return shard(seeded(partial(Stack, **options)), by_class(Block))


def batch(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    return 2.0**step * torch.randn(TOKENS, WIDTH, generator=generator)


def forward_backward(
    model: nn.Module, step: int, factor: float = 1.0, recipe: Any = SHORT, count: int = 2
) -> list[Tensor]:
    """Losses; the last microbatch's is multiplied by `factor`, and its input contains one such number."""
    losses = []
    for index, x in enumerate(microbatches(model, [batch(step, m) for m in range(count)])):
        is_last = index == count - 1
        if is_last:
            x[3, 4] *= factor
        with autocast(recipe=recipe):
            loss = model(x, index == 0).square().mean()
        (loss * factor if is_last else loss).backward()
        losses.append(loss.detach())
    return losses


def train(model: nn.Module, optimizer: Any, steps: Iterable[int], bad: Iterable[int] = ()) -> list[Tensor]:
    """Losses of the steps that are not skipped."""
    losses = []
    for step in steps:
        found = forward_backward(model, step, torch.nan if step in bad else 1.0)
        try:
            optimizer.step()
        except NonFiniteGradientError:
            assert step in bad
        optimizer.zero_grad()
        if step not in bad:
            losses += found
    return losses


def equal_models(ours: nn.Module, theirs: nn.Module) -> bool:
    a, b = (checkpoint.full_state_dict(model) for model in (ours, theirs))
    assert any("fp8_backward_amax_history" in key for key in a)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@MODES
@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"call": fp8.checkpoint}, {"checkpoint": True}], ids=["plain", "recomputed", "in layers"]
)
def test_scales_go_back_with_the_step(mode: Any, bad: int, options: dict[str, Any]) -> None:
    """This includes weights cached in the first microbatch, and the state right after the step."""
    ours, theirs = wrapped(**options), wrapped(**options)
    optimizer, reference = (AdamW(m.parameters(), lr=1e-2, nonfinite=mode) for m in (ours, theirs))
    train(ours, optimizer, range(bad + 1), [bad])
    train(theirs, reference, range(bad))
    assert bad == 0 or equal_models(ours, theirs)
    later = range(bad + 1, bad + 4)
    assert same(train(ours, optimizer, later), train(theirs, reference, later))
    assert equal_models(ours, theirs)
    assert optimizer.skipped_steps == 1


def test_a_first_step_that_is_left_out_leaves_new_scales() -> None:
    model = wrapped()
    optimizer = AdamW(model.parameters(), nonfinite="skip")
    train(model, optimizer, [0], [0])
    for name, value in fp8_state(model).items():
        assert torch.equal(
            value, torch.ones_like(value) if name.endswith("scale") else torch.zeros_like(value)
        )


@MODES
def test_scales_move_on_with_a_step_that_is_taken(mode: Any) -> None:
    """Nothing differs from an optimizer that does not settle steps."""
    models = [wrapped() for _ in range(2)]
    results = []
    for model, nonfinite in zip(models, (mode, "step"), strict=True):
        optimizer = SGD(model.parameters(), lr=0.1, nonfinite=nonfinite)
        results.append(train(model, optimizer, range(4)))
    assert same(*results) and equal_models(*models)


def test_layers_of_several_regions_and_of_another_model() -> None:
    """Under one region, layers of two models share an arena; each goes back by itself, or stays."""
    recipe = DelayedScaling(amax_history_len=4)
    pairs = [(wrapped(blocks=1), wrapped(blocks=1)) for _ in range(2)]
    optimizers = [[SGD(m.parameters(), lr=0.1, nonfinite="skip") for m in pair] for pair in pairs]
    for is_bad, pair, of_pair in zip((True, False), pairs, optimizers, strict=True):
        for step in range(4):
            skips = step == 2
            first, second = pair
            # The same for both pairs, except that the first model of the other pair has no third step.
            with autocast(recipe=recipe):
                loss = second(batch(step, 1)).square().mean()
                if is_bad or not skips:
                    loss = loss + first(batch(step, 0)).square().mean() * (torch.nan if skips else 1.0)
            if is_bad and skips:
                # NaN times the first loss must not reach the second model.
                loss.backward()
                for parameter in second.parameters():
                    assert parameter.grad.isfinite().all()
            else:
                loss.backward()
            for optimizer in of_pair if is_bad or not skips else of_pair[1:]:
                optimizer.step()
                optimizer.zero_grad()
    assert [optimizer.skipped_steps.item() for optimizer in optimizers[0]] == [1, 0]
    for ours, theirs in zip(*pairs, strict=True):
        assert equal_models(ours, theirs)


def test_steps_of_others_are_not_undone() -> None:
    """A step trained by torch.optim, or an abandoned one, is over when the next step begins."""
    ours, theirs = wrapped(), wrapped()
    for model in (ours, theirs):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    optimizer, reference = (SGD(m.parameters(), lr=0.1, nonfinite="skip") for m in (ours, theirs))
    train(ours, optimizer, [3], [3])
    assert equal_models(ours, theirs)
    for model in (ours, theirs):

        def fail(*_: Any) -> None:
            raise KeyError("on the way")

        first = model.blocks[0]
        handle = first.register_forward_hook(lambda _module, _args, out: out.register_hook(fail) and None)
        with autocast(recipe=SHORT):
            loss = model(batch(4, 0)).square().mean()
        with pytest.raises(KeyError):
            loss.backward()
        handle.remove()
    train(ours, optimizer, [5, 6], [5])
    train(theirs, reference, [6])
    assert equal_models(ours, theirs)


def test_two_optimizers_of_one_model() -> None:
    """Scales go back if one of them skips its step."""
    model = wrapped()
    parts = [list(part.parameters()) for part in (model.blocks[0], model.blocks[1])]
    optimizers = [SGD(part, lr=0.1, nonfinite="skip") for part in parts]
    forward_backward(model, 0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    before = fp8_state(model)
    for bad in (0, 1):
        forward_backward(model, 1)
        assert any(not torch.equal(value, before[key]) for key, value in fp8_state(model).items())
        parts[bad][0].grad[0] = torch.inf
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(fp8_state(model), before)


def test_an_evaluation_before_the_step_changes_nothing() -> None:
    ours, theirs = wrapped(), wrapped()
    optimizer, reference = (SGD(m.parameters(), lr=0.1, nonfinite="skip") for m in (ours, theirs))
    train(ours, optimizer, [0])
    train(theirs, reference, [0])
    forward_backward(ours, 1, torch.nan)
    with torch.no_grad(), autocast(recipe=SHORT):
        ours(batch(7, 7))
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad(), autocast(recipe=SHORT):
        assert torch.equal(ours(batch(8, 8)), theirs(batch(8, 8)))
    assert same(train(ours, optimizer, [2, 3]), train(theirs, reference, [2, 3]))


def test_a_failed_forward_does_not_keep_noting() -> None:
    model, outside = wrapped(), seeded(Stack)
    optimizer = SGD(model.parameters(), lr=0.1, nonfinite="skip")
    with pytest.raises(ValueError, match="last dimension"), autocast(recipe=SHORT):
        model(torch.ones(TOKENS, WIDTH + 16))
    with autocast(recipe=SHORT):
        outside(batch(0, 0)).square().mean().backward()
    before = fp8_state(outside)
    train(model, optimizer, [0], [0])
    assert_same_state(fp8_state(outside), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_model_goes_back_too(use_reentrant: bool) -> None:
    """A reentrant checkpoint runs the model's training forward without gradients."""
    model = wrapped()
    optimizer = SGD(model.parameters(), lr=0.1, nonfinite="skip")

    def step(number: int, factor: float) -> None:
        x = (batch(number, 0) * factor).requires_grad_()
        with autocast(recipe=SHORT):
            loss = fp8.checkpoint(model, x, use_reentrant=use_reentrant).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number, 1.0)
    before = fp8_state(model)
    step(2, torch.nan)
    assert optimizer.skipped_steps == 1
    assert_same_state(fp8_state(model), before)


def test_a_second_step_without_a_forward_moves_no_scales() -> None:
    model = wrapped()
    optimizer = SGD(model.parameters(), lr=0.1, nonfinite="skip")
    for number in range(2):
        forward_backward(model, number)
        optimizer.step()
    before = fp8_state(model)
    next(iter(model.parameters())).grad[0] = torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_state(fp8_state(model), before)
