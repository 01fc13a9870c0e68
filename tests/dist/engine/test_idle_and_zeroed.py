"""Gradients that are zeroed, asked for or penalised between microbatches, while parameters idle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import shard
from flatfsdp.optim import AdamW
from tests.support.ranks import on_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])


class Parts(nn.Module):
    """Parameters that are used by name; on two ranks `c` is empty on the first one, and `a` on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.linspace(1.0, 2.0, 16)) for _ in range(3))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return torch.stack([(x * getattr(self, name)).sum() for name in used]).sum()


def model_of(flag: bool) -> Any:
    return shard(Parts(), optimize_backward_concat=flag)


def has_grads(model: Any) -> str:
    return "".join(name for name, p in model.named_parameters() if p.grad is not None)


X = torch.ones(16)


@FLAGS
@on_ranks(1, 2)
def test_a_gradient_that_is_asked_for_drops_nothing(flag: bool) -> None:
    """`torch.autograd.grad` of listed parameters, for a log, accumulates nothing."""
    model = model_of(flag)
    with model.no_sync():
        model(X, "ab").backward()
    parameters = list(model.parameters())
    torch.autograd.grad(torch.stack([p.square().sum() for p in parameters]).sum(), parameters)
    model(X, "ab").backward()
    assert has_grads(model) == "ab"
    assert all(torch.all(p.grad.as_subclass(Tensor) == 2) for p in parameters if p.grad is not None)


@FLAGS
@on_ranks(2)
def test_a_penalty_of_the_parts_that_a_rank_has_is_a_gradient_on_all(flag: bool) -> None:
    model = model_of(flag)
    penalty = torch.stack([p.square().sum() for p in model.parameters() if p.numel()]).sum()
    (model(X, "b") + penalty).backward()
    assert has_grads(model) == "abc"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@FLAGS
@on_ranks(1, 2)
def test_a_kept_gradient_of_an_earlier_step_revives_nothing(flag: bool) -> None:
    model = model_of(flag)
    model(X, "a").backward()
    kept = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(X, "ab").backward()
    assert has_grads(model) == "ab" and len(kept) == 3


@FLAGS
@pytest.mark.parametrize("to_none", [False, True])
@on_ranks(1, 2)
def test_what_was_used_before_zero_grad_alone_is_not_moved(to_none: bool, flag: bool) -> None:
    model = model_of(flag)
    optimizer = AdamW(model.parameters(), weight_decay=0.5)
    with model.no_sync():
        model(X, "a").backward()
    optimizer.zero_grad(set_to_none=to_none)
    model(X, "b").backward()
    assert has_grads(model) == "b"
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if p.numel() and optimizer.state.get(p)]
    assert set(moved) <= {"b"}


@FLAGS
@on_ranks(1, 2)
def test_an_optimizer_of_what_idles_may_step_after_a_validation(flag: bool) -> None:
    model = model_of(flag)
    of_b, of_c = (torch.optim.SGD([dict(model.named_parameters())[name]]) for name in "bc")
    model(X, "b").backward()
    model(X, "b")
    of_b.step()
    of_c.step()
