"""Microbatches: any order of forwards and backwards, any way to mark the last one, and recovery."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import by_class, microbatches, shard
from tests.support.models import (
    FLAGS,
    Block,
    Net,
    backward,
    build,
    data,
    each_policy,
    grads_of,
    plain_net,
    same,
)
from tests.support.ranks import on_ranks


def step(model: Any, batches: list[Tensor]) -> list[Tensor]:
    backward(model, batches)
    return grads_of(model)


def all_forwards_first(model: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = [model(tokens) for tokens in batches]
    for index, loss in enumerate(losses):
        model.set_is_last_backward(index == len(losses) - 1)
        loss.backward()
    return grads_of(model)


def one_forward_ahead(model: Any, batches: list[Tensor]) -> list[Tensor]:
    pending = [model(batches[0])]
    for index in range(len(batches)):
        if index + 1 < len(batches):
            pending.append(model(batches[index + 1]))
        model.set_is_last_backward(index == len(batches) - 1)
        pending.pop(0).backward()
    return grads_of(model)


def with_no_sync(model: Any, batches: list[Tensor]) -> list[Tensor]:
    with model.no_sync():
        for tokens in batches[:-1]:
            model(tokens).backward()
    model(batches[-1]).backward()
    return grads_of(model)


def forwards_under_no_sync(model: Any, batches: list[Tensor]) -> list[Tensor]:
    with model.no_sync():
        losses = [model(tokens) for tokens in batches]
        for loss in losses[:-1]:
            loss.backward()
    losses[-1].backward()
    return grads_of(model)


SCHEDULES = [all_forwards_first, one_forward_ahead, with_no_sync, forwards_under_no_sync]


@each_policy
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_every_schedule_gives_the_same_gradients(rank: int, schedule: Any, policy: Any) -> None:
    """Two steps each, so that the second runs with a recorded order and prefetching."""
    model, reference = build(**policy), build(**policy)
    for batches in data(rank, steps=2, count=3):
        assert same(schedule(model, batches), step(reference, batches))
        for m in (model, reference):
            m.zero_grad()


@FLAGS
@on_ranks(2)
def test_unmarked_backwards_add_up_on_the_shard(rank: int, flag: bool) -> None:
    """Without any marking every backward reduces, and reduced gradients add up in `.grad`."""
    model = build(optimize_backward_concat=flag)
    batches = next(data(rank, 1, 2))
    for tokens in batches:
        model(tokens).backward()
    together = grads_of(model)
    expected = []
    for tokens in batches:
        model.zero_grad()
        model(tokens).backward()
        expected.append(grads_of(model))
    assert same(together, [a + b for a, b in zip(*expected, strict=True)])


class BoomError(RuntimeError):
    pass


def fail(*_: Any) -> None:
    raise BoomError


def fail_in_backward(_module: Any, _inputs: Any, output: Tensor) -> None:
    output.register_hook(fail)


@each_policy
@pytest.mark.parametrize(("layer", "hook"), [("down", fail), ("up", fail_in_backward)])
@on_ranks(2)
def test_a_failed_microbatch_leaves_the_next_step_clean(
    rank: int, layer: str, hook: Any, policy: Any
) -> None:
    """An exception in microbatch 2 of 3, caught by the user, then a clean step."""
    model, fresh = build(**policy), build(**policy)
    failing, clean = data(rank, 2, 3)
    batches = microbatches(model, failing)
    model(next(batches)).backward()
    with getattr(model.blocks[1], layer).register_forward_hook(hook), pytest.raises(BoomError):
        model(next(batches)).backward()
    batches.close()
    assert same(step(model, clean), step(fresh, clean))


@FLAGS
@on_ranks(2)
def test_a_backward_that_fails_half_reduced_leaves_no_gradient(rank: int, flag: bool) -> None:
    """The last microbatch's backward fails after some units have been reduced."""
    nets = (plain_net(partial(Net, 6)) for _ in range(2))
    model, fresh = (shard(net, by_class(Block), optimize_backward_concat=flag) for net in nets)
    failing, clean = data(rank, 2, 2)

    def fail_in_the_last(*hooked: Any) -> None:
        if model.fsdp_state.shared.microbatch.is_last:
            fail_in_backward(*hooked)

    with model.blocks[0].up.register_forward_hook(fail_in_the_last), pytest.raises(BoomError):
        backward(model, failing)
    with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
        torch.optim.SGD(model.parameters()).step()
    assert same(step(model, clean), step(fresh, clean))


@on_ranks(2)
def test_failed_evaluation_and_a_childs_zero_grad_leave_other_gradients_alone(rank: int) -> None:
    """An exception in an eval forward between microbatches loses nothing; nor does a child's zero_grad."""
    model, reference = build(), build()
    first, second = next(data(rank, 1, 2))
    for m in (model, reference):
        with m.no_sync():
            m(first).backward()
        if m is model:
            with pytest.raises(IndexError), torch.no_grad():
                m(torch.full((1, 2), 999))
        m(second).backward()
    assert same(grads_of(model), grads_of(reference))
    with model.no_sync():
        model(first).backward()
    model.blocks[2].zero_grad()
    kept = [m.fsdp_state.trained[0].main_grad.holds_gradients for m in (model, *model.blocks)]
    assert kept == [True, True, True, False]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_units_that_run_in_the_reverse_of_their_registration_are_reported(
    is_reversed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Reductions keep one order on all ranks, so that a unit that lands late holds up the others."""
    net = Net(blocks=5)
    if is_reversed:
        net.logits = lambda tokens: _backwards(net, tokens)  # type: ignore[method-assign]
    model = shard(net, by_class(Block))
    for _ in range(2):
        step(model, next(data(0, 1, 1)))
    messages = [record.getMessage() for record in caplog.records if "held them up" in record.getMessage()]
    assert len(messages) == is_reversed
    if is_reversed:
        assert "unit blocks.4 landed after those of 4 units" in messages[0]


def _backwards(net: Net, tokens: Tensor) -> Tensor:
    x = net.embedding(tokens)
    for block in reversed(net.blocks):
        x = block(x)
    return net.head(x)


def test_a_late_loop_end_does_not_disturb_the_next_loop() -> None:
    model = build()
    abandoned = microbatches(model, [1, 2, 3])
    next(abandoned)
    current = microbatches(model, [1, 2])
    next(current)
    abandoned.close()
    assert not model.fsdp_state.shared.microbatch.is_last
    next(current)
    assert model.fsdp_state.shared.microbatch.is_last
    assert not model.fsdp_state.shared.microbatch.is_first


def test_a_step_without_its_last_backward_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that is left with `break`, or whose last batch was skipped."""
    batches = next(data(0, 1, 3))
    expected = build()
    expected(batches[2]).backward()
    model = build()
    for leave in (True, False):
        for index, batch in enumerate(microbatches(model, batches)):
            if index == 2:
                if leave:
                    break
                continue
            model(batch).backward()
        assert "those of 2 backwards are dropped" in caplog.text
        caplog.clear()
        with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
            torch.optim.SGD(model.parameters()).step()
        model(batches[2]).backward()
        assert same(grads_of(model), grads_of(expected))
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    caplog.clear()
    for batch in microbatches(model, batches):
        with torch.no_grad():
            model(batch)
    assert not caplog.messages


@pytest.mark.parametrize("grad_sync", ["last", "every"])
def test_a_loop_that_another_one_replaces_has_lost_its_gradients(
    grad_sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable may keep a loop alive that was left; a loop around another one is not left."""
    batches = next(data(0, 1, 3))
    model = build(grad_sync=grad_sync)
    kept = microbatches(model, batches)
    model(next(kept)).backward()
    backward(model, batches)
    assert caplog.text.count("those of 1 backwards are dropped") == 1
    caplog.clear()
    kept.close()
    assert not caplog.messages


def test_microbatches_looks_only_one_batch_ahead() -> None:
    drawn = []

    def source() -> Any:
        for index in range(4):
            drawn.append(index)
            yield index

    model = build()
    microbatch = model.fsdp_state.shared.microbatch
    seen = [(len(drawn), batch, microbatch.is_last) for batch in microbatches(model, source())]
    assert seen == [(2, 0, False), (3, 1, False), (4, 2, False), (4, 3, True)]
    assert list(microbatches(model, [])) == []
