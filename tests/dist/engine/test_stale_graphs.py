"""A backward whose parameters have changed since its forward raises, as PyTorch's version counters do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, param_groups, shard
from flatfsdp.optim import AdamW
from tests.support.against_plain import assert_equal
from tests.support.models import FLAGS, build, data, each_policy, grads_of, same, whole_grads
from tests.support.ranks import on_ranks


def batches(rank: int) -> list[Tensor]:
    return next(data(rank, 1, 3))


def step_of(model: Any, kind: str) -> Callable[[], Any]:
    """Something that changes the parameters of all units."""
    if kind == "ours":
        return AdamW(model.parameters(), lr=0.1).step
    if kind == "grouped":
        return torch.optim.SGD(param_groups(model, [{"params": ["head.bias"], "lr": 1.0}]), lr=0.1).step
    if kind == "load":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return lambda: model.load_state_dict(state)
    return torch.optim.SGD(model.parameters(), lr=0.1).step


@each_policy
@pytest.mark.parametrize("kind", ["torch", "ours", "grouped", "load"])
@on_ranks(1, 2)
def test_a_graph_from_before_a_change_raises(rank: int, kind: str, policy: Any) -> None:
    precision = Precision(compute=torch.bfloat16 if kind == "ours" else torch.float32)
    model, fresh = (build(precision=precision, **policy) for _ in range(2))
    change = step_of(model, kind)
    first, second, third = batches(rank)
    kept = model(first)
    model(second).backward()
    change()
    with pytest.raises(RuntimeError, match=r"parameters of unit root changed between this forward and its"):
        kept.backward()
    model.zero_grad()
    # The next step is clean.
    model(third).backward()
    fresh.load_state_dict(model.state_dict())
    fresh(third).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


@FLAGS
@on_ranks(2)
def test_a_rank_of_padding_alone_raises_with_the_others(flag: bool) -> None:
    """The second rank has only padding, and raises with the first one."""
    model = shard(nn.Linear(2, 2), optimize_backward_concat=flag)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    kept = model(x).sum()
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="unit root changed between this forward and its backward"):
        kept.backward()


@on_ranks(2)
def test_the_unit_is_named(rank: int) -> None:
    """The message names the unit that changed."""
    model = build()
    loss = model(batches(rank)[0])
    with torch.no_grad():
        next(model.blocks[1].parameters()).mul_(0.5)
    with pytest.raises(RuntimeError, match=r"parameters of unit blocks\.1 changed"):
        loss.backward()


@each_policy
@on_ranks(1, 2)
def test_backwards_with_the_same_parameters_do_not_raise(rank: int, policy: Any) -> None:
    """Several forwards before a backward, several backwards of one forward, and evaluations in between."""
    model = build(**policy)
    tokens = batches(rank)
    model(tokens[0]).backward()
    expected = grads_of(model)
    model.zero_grad()
    losses = [model(each) for each in tokens]
    with torch.no_grad():
        model(tokens[0])
    model.state_dict()
    losses[0].backward(retain_graph=True)
    assert same(grads_of(model), expected)
    losses[0].backward()
    assert same(grads_of(model), [2 * grad for grad in expected])
    (losses[1] + losses[2]).backward()
    model.zero_grad()


@FLAGS
@on_ranks(2)
def test_a_step_of_another_model_in_between_is_no_change(flag: bool) -> None:
    """A step of the critic between forward and backward of the generator changes the critic alone."""
    torch.manual_seed(0)
    generator = shard(nn.Linear(4, 4), optimize_backward_concat=flag)
    critic = shard(nn.Linear(4, 1), optimize_backward_concat=flag)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    fake = generator(torch.ones(2, 4))
    critic(fake.detach()).sum().backward()
    optimizer.step()
    critic(fake).sum().backward()
    assert all(p.grad.isfinite().all() for p in generator.parameters())
