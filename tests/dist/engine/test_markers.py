"""Steps that are not finished, and what is in `.grad`: a step raises, `zero_grad()` drops, a copy is plain.

Gradients that are accumulated and not reduced are marked in `.grad`; a reduced one is a part of a gradient
that answers for all ranks, and nothing that is computed from it takes that along.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import flatfsdp.optim
from flatfsdp import by_class, microbatches, shard
from tests.support.against_plain import assert_equal
from tests.support.models import Block, Net, backward, data, plain_net, same, update
from tests.support.ranks import on_ranks

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: flatfsdp.optim.AdamW(parameters, lr=0.1),
    lambda parameters: flatfsdp.optim.SGD(parameters, lr=0.1, max_grad_norm=1.0),
]


def net_of_one_block() -> Net:
    return plain_net(partial(Net, blocks=1))


def build(flag: bool = True) -> Any:
    return shard(net_of_one_block(), by_class(Block), optimize_backward_concat=flag)


# ---- a step that is left -----------------------------------------------------------------------------------


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


def plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def steps_taken(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> dict[str, Tensor]:
    backward(model, batches)
    optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@LEAVE
@on_ranks(1, 2)
def test_a_step_that_was_left_raises_in_the_optimizer(rank: int, leave: Any, flag: bool) -> None:
    """And moves nothing; `zero_grad()` drops what was accumulated, and the next step is a clean one."""
    left, good = data(rank, 2, 3)
    for number, make in enumerate(OPTIMIZERS):
        model, fresh = build(flag), build(flag)
        optimizer = make(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        leave(model, left)
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert same(before, list(model.parameters()))
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        expected = steps_taken(fresh, make(fresh.parameters()), good)
        torch.testing.assert_close(steps_taken(model, optimizer, good), expected, rtol=1e-6, atol=1e-7)


@LEAVE
@on_ranks(1, 2)
def test_no_norm_of_a_step_that_was_left_is_a_plausible_number(rank: int, leave: Any) -> None:
    (left,) = data(rank, 1, 3)
    model = build()
    leave(model, left)
    for clip in (lambda: clip_grad_norm_(model.parameters(), 1.0), lambda: model.clip_grad_norm_(1.0)):
        with suppress(RuntimeError):
            assert not clip().isfinite()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError):
        scaler.step(optimizer)


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
    net, plain = (plain_net(partial(nn.Linear, 4, 4, bias)) for _ in range(2))
    model = shard(net)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    compiled = torch.compile(ours.step, backend="eager")
    try:
        for _ in range(3):
            for each in (model, plain):
                each(torch.ones(2, 4)).square().sum().backward()
            compiled()
            ours.zero_grad()
            update(theirs)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


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


@on_ranks(2)
def test_norms_answer_for_all_ranks(rank: int, world_size: int) -> None:
    """The same holds for a gradient that was clipped, scaled or added to in place."""
    net = net_of_one_block()
    for other in range(world_size):
        ((tokens,),) = data(other, 1, 1)
        (net(tokens) / world_size).backward()
    model = build()
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    for _ in range(2):
        for each in (model, net):
            for parameter in each.parameters():
                parameter.grad.mul_(2.0)
        found, expected = (clip_grad_norm_(each.parameters(), 0.5) for each in (model, net))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
