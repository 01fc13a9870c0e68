"""Gradients that are accumulated and not reduced are marked in `.grad`: a step raises, `zero_grad()` drops.

A reduced one is a part of a gradient that answers for all ranks, and nothing that is computed from it takes
that along.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import flatfsdp.optim
from flatfsdp import Precision, checkpoint, microbatches, shard
from flatfsdp.engine.storage.shard_grad import plain
from tests.support.against_plain import assert_equal
from tests.support.models import FLAGS, backward, build, data, plain_net, same, update, whole_grads
from tests.support.ranks import on_ranks

SYNC = pytest.mark.parametrize("sync", ["last", "every"])

BF16 = torch.bfloat16
WIDE = Precision(param=BF16, compute=BF16, grad=torch.float32)


def accumulate(model: Any, tokens: Tensor) -> None:
    with model.no_sync():
        model(tokens).backward()


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "single": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "ours": lambda parameters: flatfsdp.optim.AdamW(parameters, lr=0.1),
    "clipping": lambda parameters: flatfsdp.optim.SGD(parameters, lr=0.1, max_grad_norm=1.0),
}
"""Optimizers of parameters."""
OPTIMIZERS = pytest.mark.parametrize("make", MAKES)


@FLAGS
@SYNC
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@pytest.mark.parametrize("to_none", [True, False])
@OPTIMIZERS
@on_ranks(1, 2)
def test_zero_grad_of_an_optimizer_drops_what_is_accumulated(
    rank: int, make: str, to_none: bool, reshard: bool, sync: str, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "grad_sync": sync, "reshard_after_forward": reshard}
    ((bad, worse, *good),) = data(rank, 1, 4)
    fresh = build(**options)
    backward(fresh, good)
    expected = whole_grads(fresh)
    model = build(**options)
    optimizer = MAKES[make](model.parameters())
    accumulate(model, bad)
    accumulate(model, worse)
    optimizer.zero_grad(set_to_none=to_none)
    backward(model, good)
    assert_equal(whole_grads(model), expected)
    # Without zero_grad both add up.
    backward(model, good)
    assert_equal(whole_grads(model), {key: 2 * grad for key, grad in expected.items()})


@FLAGS
@on_ranks(2)
def test_zero_grad_between_a_forward_and_its_backward(rank: int, flag: bool) -> None:
    """Some trainers call zero_grad right before the backward."""
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(optimize_backward_concat=flag) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, bad)
    loss = model(good)
    optimizer.zero_grad()
    loss.backward()
    fresh(good).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


@FLAGS
@SYNC
@on_ranks(1, 2)
def test_a_gradient_from_an_earlier_step_is_watched(rank: int, sync: str, flag: bool) -> None:
    """A gradient that is there already is watched itself; clipping it drops nothing."""
    options = {"optimize_backward_concat": flag, "grad_sync": sync}
    ((first, bad, good),) = data(rank, 1, 3)
    only = build(**options)
    only(good).backward()
    expected = whole_grads(only)
    for to_none in (True, False):
        model = build(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(first).backward()
        accumulate(model, bad)
        optimizer.zero_grad(set_to_none=to_none)
        model(good).backward()
        assert_equal(whole_grads(model), expected)
    model, plain = build(**options), build(**options)
    model(first).backward()
    accumulate(model, bad)
    model.clip_grad_norm_(0.5)
    model(good).backward()
    plain(first).backward()
    plain.clip_grad_norm_(0.5)
    accumulate(plain, bad)
    plain(good).backward()
    assert_equal(whole_grads(model), whole_grads(plain))


@FLAGS
@OPTIMIZERS
@on_ranks(1, 2)
def test_a_step_before_the_last_backward_raises(rank: int, make: str, flag: bool) -> None:
    """A step, a norm or a scaler in the middle of a step raises, and changes nothing."""
    ((first, second),) = data(rank, 1, 2)
    model, fresh = (build(optimize_backward_concat=flag) for _ in range(2))
    optimizer = MAKES[make](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    accumulate(model, first)
    with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
        optimizer.step()
    assert same(before, list(model.parameters()))
    assert not any(optimizer.state.values())
    for clip in (model.clip_grad_norm_, partial(nn.utils.clip_grad_norm_, model.parameters())):
        with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
            clip(1.0)
    model.state_dict()
    checkpoint.full_optimizer_state_dict(model, optimizer)
    assert "not yet reduced" in repr(next(model.parameters()).grad)
    model(second).backward()
    accumulate(fresh, first)
    fresh(second).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))
    # Zeroed: there are no gradients, as in PyTorch.
    update(optimizer)
    accumulate(model, first)
    optimizer.zero_grad()
    after = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert same(after, list(model.parameters()))


@on_ranks(2)
def test_what_is_accumulated_is_watched_by_one_marker_a_parameter(rank: int) -> None:
    model = build()
    ((first, second, last),) = data(rank, 1, 3)
    markers = []
    for _ in range(2):
        for tokens in (first, second):
            accumulate(model, tokens)
            markers.append([p.grad for p in model.parameters()])
        model(last).backward()
        model.zero_grad()
    assert all(a is b for each in markers[1:] for a, b in zip(each, markers[0], strict=True))


@FLAGS
@on_ranks(1, 2)
def test_gradients_in_main_grad(rank: int, flag: bool) -> None:
    """The marker is in `.grad`, in its dtype, even if the reduced gradient is in `main_grad`."""
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(precision=WIDE, optimize_backward_concat=flag) for _ in range(2))
    for zero_grad in (torch.optim.SGD(model.parameters()).zero_grad, model.zero_grad):
        accumulate(model, bad)
        zero_grad()
        model(good).backward()
        fresh(good).backward()
        assert_equal(whole_grads(model), whole_grads(fresh))
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad()
        fresh.zero_grad()
    accumulate(model, bad)
    with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
        flatfsdp.optim.AdamW(model.parameters()).step()


@on_ranks(2)
def test_an_offloaded_model(rank: int) -> None:
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(cpu_offload=True, precision=Precision(compute=BF16)) for _ in range(2))
    accumulate(model, bad)
    torch.optim.SGD(model.parameters()).zero_grad()
    model(good).backward()
    fresh(good).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


def leave_a_loop(model: Any, batches: list[Tensor]) -> None:
    for tokens in microbatches(model, batches):
        model(tokens).backward()
        return


def fail(model: Any, batches: list[Tensor]) -> None:
    accumulate(model, batches[0])
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 1000))


@pytest.mark.parametrize("leave", [leave_a_loop, fail])
def test_no_marker_is_left_of_a_step_that_has_ended(leave: Callable[..., None]) -> None:
    model = build()
    batches = next(data(0, 1, 2))
    leave(model, batches)
    with torch.no_grad():
        # Until then, a marker lets an optimizer's step raise.
        model(batches[0])
    assert all(p.grad is None for p in model.parameters())


def test_a_marker_takes_no_memory_and_keeps_nothing() -> None:
    model = build()
    parameters = list(model.parameters())
    rows = model.memory_report().rows
    accumulate(model, next(data(0, 1, 1))[0])
    assert model.memory_report().rows == rows
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            assert parameter.grad.untyped_storage().nbytes() == parameter.element_size()
            assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
    kept = [weakref.ref(parameter) for parameter in parameters]
    del model, parameters, parameter
    gc.collect()
    assert not any(reference() is not None for reference in kept)


# ---- steps that are left, and what is computed from a gradient -------------------------------------------


def by_break(model: Any, batches: list[Tensor]) -> None:
    for number, tokens in enumerate(microbatches(model, batches)):
        if number == 1:
            break
        model(tokens).backward()


def by_continue(model: Any, batches: list[Tensor]) -> None:
    for number, tokens in enumerate(microbatches(model, batches)):
        if number == len(batches) - 1:
            continue
        model(tokens).backward()


def by_islice(model: Any, batches: list[Tensor]) -> None:
    for tokens in itertools.islice(microbatches(model, batches), 2):
        model(tokens).backward()


LEAVE = pytest.mark.parametrize("leave", [by_break, by_continue, by_islice])


def steps_taken(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> dict[str, Tensor]:
    backward(model, batches)
    optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@FLAGS
@LEAVE
@OPTIMIZERS
@pytest.mark.parametrize("to_none", [True, False])
@on_ranks(1, 2)
def test_a_step_that_was_left_raises_in_the_optimizer(
    rank: int, leave: Any, make: str, to_none: bool, flag: bool
) -> None:
    """And moves nothing, nor does it have a norm; `zero_grad()` drops what was accumulated, and the next step
    is a clean one."""
    left, good = data(rank, 2, 3)
    model, fresh = (build(optimize_backward_concat=flag) for _ in range(2))
    optimizer = MAKES[make](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    leave(model, left)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for step in (optimizer.step, partial(scaler.step, optimizer)):
        with pytest.raises(RuntimeError):
            step()
        assert same(before, list(model.parameters()))
    for clip in (partial(clip_grad_norm_, model.parameters()), model.clip_grad_norm_):
        with suppress(RuntimeError):
            assert not clip(1.0).isfinite(), "a plausible number"
    optimizer.zero_grad(set_to_none=to_none)
    expected = steps_taken(fresh, MAKES[make](fresh.parameters()), good)
    torch.testing.assert_close(steps_taken(model, optimizer, good), expected, rtol=1e-6, atol=1e-7)


@LEAVE
@on_ranks(2)
def test_what_was_left_is_dropped_and_gradients_of_earlier_steps_are_too(rank: int, leave: Any) -> None:
    """`zero_grad()` of the model, as of the optimizer, where a reduced gradient was there before."""
    first, left, good = data(rank, 3, 3)
    for of_model, to_none in ((True, False), (False, True), (False, False)):
        model, fresh = build(), build()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, fresh)]
        for each, optimizer in zip((model, fresh), optimizers, strict=True):
            steps_taken(each, optimizer, first)
        leave(model, left)
        (model if of_model else optimizers[0]).zero_grad(set_to_none=to_none)
        optimizers[1].zero_grad()
        assert_equal(steps_taken(model, optimizers[0], good), steps_taken(fresh, optimizers[1], good))


# ---- what is computed from a gradient ----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["one parameter", "two parameters"])
@on_ranks(1)
def test_a_compiled_step_is_the_eager_one(bias: bool) -> None:
    net, other = (plain_net(partial(nn.Linear, 4, 4, bias)) for _ in range(2))
    model = shard(net)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    compiled = torch.compile(ours.step, backend="eager")
    try:
        for _ in range(3):
            for each in (model, other):
                each(torch.ones(2, 4)).square().sum().backward()
            compiled()
            ours.zero_grad()
            update(theirs)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@on_ranks(1, 2)
def test_a_function_that_is_compiled_may_be_given_a_gradient(rank: int) -> None:
    model = build()
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    doubled = torch.compile(lambda grad: grad * 2, backend="eager")
    try:
        for parameter in model.parameters():
            assert torch.equal(plain(doubled(parameter.grad)), plain(parameter.grad) * 2)
    finally:
        torch._dynamo.reset()


@on_ranks(1, 2)
def test_what_is_made_of_a_gradient_is_a_plain_tensor(rank: int) -> None:
    model = build()
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    for parameter in model.parameters():
        grad = parameter.grad
        made = (grad.clone(), torch.clone(grad).detach(), torch.empty_like(grad), torch.zeros_like(grad))
        assert all(type(each) is Tensor for each in (*made, grad._base) if each is not None)
    if rank == 0:
        # A logger on one rank waits for nobody.
        assert next(model.parameters()).grad.clone().norm() > 0


@on_ranks(1, 2)
def test_the_momentum_buffers_of_pytorch_are_plain_tensors(rank: int) -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"nesterov": True, "weight_decay": 0.1}):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
        for batches in data(rank, 2, 1):
            model(batches[0]).backward()
            update(optimizer)
        buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        assert {type(buffer) for buffer in buffers} == {Tensor}
