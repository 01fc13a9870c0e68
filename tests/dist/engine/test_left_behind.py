"""Tensors that a forward leaves on its modules, for a loss outside, have right gradients; others raise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Debug, by_class, shard
from tests.support.left_behind import OUTSIDE, PLACES, Gated, Model, check, inputs, loss_of
from tests.support.models import FLAGS, whole_grads
from tests.support.ranks import on_ranks


@FLAGS
@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_what_a_unit_leaves_on_its_modules_is_like_an_output(flag: bool, place: str) -> None:
    for options in ({}, {"reshard_after_forward": False}, {"debug": Debug(poison_on_free=True)}):
        model = shard(Model(place), by_class(Gated), optimize_backward_concat=flag, **options)
        check(Model(place), model, inputs(2))


@FLAGS
@pytest.mark.parametrize("place", ["list", "outer list", "accumulated"])
@on_ranks(2)
def test_each_call_of_a_unit_may_leave_one(flag: bool, place: str) -> None:
    model = shard(Model(place, uses=2), by_class(Gated), optimize_backward_concat=flag)
    check(Model(place, uses=2), model, inputs(1))


@FLAGS
@on_ranks(2)
def test_a_loss_of_nothing_but_what_was_left_works(flag: bool) -> None:
    plain, model = Model("attribute"), Model("attribute")
    shard(model, by_class(Gated), optimize_backward_concat=flag)
    for each in (plain, model):
        each(inputs(1)[0])
        sum(block.aux for block in each.blocks).backward()
    found = whole_grads(model)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad)


@FLAGS
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_recomputed_units_leave_theirs_too(flag: bool, reentrant: bool) -> None:
    class Recomputed(Model):
        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
                if reentrant:
                    # What is left in a forward without gradients has none, in PyTorch as well.
                    assert not block.aux.requires_grad
                    block.aux = torch.zeros(())
            return self.head(x).mean()

    model = shard(Recomputed("attribute"), by_class(Gated), optimize_backward_concat=flag)
    check(Recomputed("attribute"), model, inputs(1))


class ComesLater(Model):
    """A model whose blocks leave nothing in the first forwards."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        for block in self.blocks:
            block.place = "attribute"
        return loss


@FLAGS
@on_ranks(2)
def test_a_forward_may_begin_late_to_leave_something(flag: bool) -> None:
    plain, model = ComesLater("outside"), ComesLater("outside")
    shard(model, by_class(Gated), optimize_backward_concat=flag)
    for each in (plain, model):
        each(inputs(1)[0])
        OUTSIDE.clear()
    check(plain, model, inputs(1))


@FLAGS
@on_ranks(2)
def test_what_a_unit_leaves_elsewhere_raises(flag: bool) -> None:
    """It reads freed memory: never NaN, never a crash."""
    model = shard(Model("outside"), by_class(Gated), optimize_backward_concat=flag)
    loss = loss_of(model, inputs(1)[0])
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()
    # The next step is clean.
    for block in (module for module in model.modules() if isinstance(module, Gated)):
        block.place = "attribute"
    model.zero_grad()
    check(Model("attribute"), model, inputs(1))


class Summed(nn.Module):
    """A layer with a custom function, which saves nothing for autograd to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        OUTSIDE.append(self.weight.sum())
        return x.detach()


@FLAGS
@on_ranks(2)
def test_a_gradient_that_lands_in_a_freed_unit_raises(flag: bool) -> None:
    model = shard(nn.Sequential(Summed()), by_class(Summed), optimize_backward_concat=flag)
    model(torch.ones(4))
    loss = OUTSIDE.pop()
    with pytest.raises(
        RuntimeError, match=r"gradient of unit 0 was computed while its parameters were sharded"
    ):
        loss.backward()
