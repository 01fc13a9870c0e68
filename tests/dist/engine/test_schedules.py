"""Microbatches: any order of forwards and backwards, any way to mark the last one, and recovery."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Precision, by_class, microbatches, shard
from flatfsdp.engine.replay.eager_or_replayed import keep_addresses
from flatfsdp.engine.step import root as roots
from flatfsdp.engine.storage.main_grad import SMALL
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import root_of
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import Linear
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


SCHEDULES = [one_forward_ahead, with_no_sync]


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
    kept = [m.fsdp_state.groups[0].main_grad.holds_gradients for m in (model, *model.blocks)]
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


# ---- amaxes of a backward that raises --------------------------------------------------------------------


WIDTH = 32


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, error: type[Exception] | None) -> Tensor:
        ctx.error = error  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.error is not None:  # type: ignore[attr-defined]
            raise ctx.error  # type: ignore[attr-defined]
        return grad, None


class Scaled(nn.Module):
    error: type[Exception] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(Fails.apply(torch.tanh(self.first(x)), self.error))
        return y


def scales(factor: float | None) -> list[Tensor]:
    """Gradient scales of the last layer after each good step; step 1 fails, with its gradient times `factor`.

    Gradients grow from step to step.
    """
    torch.manual_seed(0)
    model, found = shard(Scaled()), []
    for step in range(5):
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
        model.error = ZeroDivisionError if step == 1 else None
        if step == 1 and factor is None:
            continue
        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            y = model(x)
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                (y.square().mean() * factor).backward()
        else:
            (y.square().mean() * 4.0**step).backward()
            found.append(model.last.fp8_backward_scale.clone())
        model.zero_grad()
    return found


@on_ranks(1)
def test_amaxes_of_good_steps_before_stay(rank: int) -> None:
    """One region around three steps, whose scales move at its end; the second fails."""
    torch.manual_seed(0)
    model, x = shard(Scaled()), torch.randn(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        for factor, error in ((100.0, None), (1.0, ZeroDivisionError), (1.0, None)):
            model.error = error
            y = model(factor * x)
            with nullcontext() if error is None else pytest.raises(error):
                y.square().mean().backward()
            if error is None:
                optimizer.step()
            optimizer.zero_grad()
    assert model.first.fp8_forward_amax_history[-1, 0] == 100 * x.abs().max()


@pytest.mark.parametrize("factor", [1e30, float("nan")])
@on_ranks(1)
def test_scales_are_those_of_a_training_without_it(factor: float) -> None:
    assert all(map(torch.equal, scales(factor), scales(None)))


# ---- what is left where a backward, or a model's first use, ends early, twice, or inside of a hook -------


WIDE = 272
assert WIDE**2 > SMALL


class Twice(nn.Module):
    """A layer inside a reentrant checkpoint, whose backward is nested, and once more outside."""

    def __init__(self) -> None:
        super().__init__()
        # Wide, so that the gradient is added as it lands: smaller ones wait for each other.
        self.first, self.layer = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Any:
        inside = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return self.layer(inside)


class Idle(nn.Module):
    """A module with a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def require_gradients_of(expected: nn.Module, model: nn.Module) -> None:
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        # A single rank has all elements, in the order of the parameter.
        torch.testing.assert_close(plain(parameter.grad), reference.grad.flatten())


@pytest.mark.parametrize("keeps", [None, False, True], ids=["nothing", "gradients", "gradients and sums"])
def test_a_unit_that_is_reduced_twice_in_a_backward_has_both_gradients(keeps: bool | None) -> None:
    torch.manual_seed(0)
    expected, x, hooks = Twice(), torch.randn(3, WIDE), []
    model = copy.deepcopy(expected)
    shard(model.layer)
    shard(model.first)
    shard(model)
    if keeps is not None:
        # As `replayed` does before its first microbatch.
        keep_addresses(root_of(model), of_sums=keeps)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooks.append)
    expected(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    require_gradients_of(expected, model)
    assert len(hooks) == len(list(model.parameters()))


@on_ranks(1, 2)
def test_a_refused_gradient_is_not_added_to_the_next_step(rank: int) -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="was computed while its parameters were sharded"):
        (model[0].weight * 5).sum().backward()
    for batch in microbatches(model, [x]):
        model(batch).sum().backward()
    grads = [plain(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    # Each row of the weight's gradient is the sum of the inputs, each element of the bias's their number.
    assert grads and all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in grads)


@pytest.mark.parametrize("count", [1, 2])
def test_hooks_step_optimizers_while_a_parameter_idles(count: int) -> None:
    model = shard(Idle())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for batch in microbatches(model, [torch.ones(2, 4)] * count):
            model(batch).sum().backward()
    after = [parameter.detach() for parameter in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [True, True, False, False]
    assert root_of(model).microbatch.steps_reduced == 2


def test_a_first_use_that_fails_can_be_repeated() -> None:
    model = shard(nn.Linear(4, 4))
    with (
        mock.patch.object(roots, "make_equal", side_effect=RuntimeError("interrupted")),
        pytest.raises(RuntimeError, match="interrupted"),
    ):
        model(torch.ones(1, 4))
    assert torch.isfinite(model(torch.ones(1, 4))).all()


def test_a_pickled_parameter_takes_no_engine_along() -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = shard(nn.Sequential(Linear(32, 32)), precision=precision)
    model(torch.ones(32, 32)).sum().backward()
    weight = pickle.loads(pickle.dumps(model[0].weight))
    assert weight.shape == (32, 32)
    assert weight.fp8_operand is None and weight.claim_main_grad is None
