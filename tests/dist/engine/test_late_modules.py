"""Modules added below a unit after it was built are refused if they have parameters of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from flatfsdp import shard
from tests.support.models import Block, Net, build, data, flat, grads_of, same
from tests.support.ranks import on_ranks


class LoRA(nn.Module):
    """A layer with two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _lora(model: Any) -> None:
    model.blocks[1].up = LoRA(model.blocks[1].up)


def _new_layer(model: Any) -> None:
    model.blocks[0].gate = nn.Linear(2, 2)


def _by_add_module(model: Any) -> None:
    model.add_module("gate", nn.Linear(2, 2))


def _another_block(model: Any) -> None:
    model.blocks.append(Block())


def _resized(model: Any) -> None:
    model.embedding = nn.Embedding(50, 20)


@pytest.mark.parametrize("change", [_lora, _new_layer, _by_add_module, _another_block, _resized])
@on_ranks(2)
def test_new_parameters_below_a_unit_are_refused(rank: int, change: Callable[[Any], None]) -> None:
    model = build()
    modules = dict(model.named_modules())
    with pytest.raises(TypeError, match=r"brings parameter .* is built already.*Change the model"):
        change(model)
    assert dict(model.named_modules()) == modules


def _without_head(model: Any) -> None:
    model.head = nn.Identity()


def _none(model: Any) -> None:
    model.head = None


def _fewer_blocks(model: Any) -> None:
    model.blocks = nn.ModuleList(list(model.blocks)[:2])


@pytest.mark.parametrize("change", [_without_head, _none, _fewer_blocks])
@on_ranks(2)
def test_what_a_unit_has_sharded_is_not_taken_out_of_the_model(change: Callable[[Any], None]) -> None:
    model = build()
    with pytest.raises(TypeError, match="is replaced in a unit that is built already"):
        change(model)


class Loss(nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("flag", [True, False])
@on_ranks(2)
def test_modules_that_train_nothing_and_wrappers_may_come(rank: int, flag: bool) -> None:
    plain, model = (build(optimize_backward_concat=flag) for _ in range(2))
    model.loss = Loss()
    model.blocks[0].loss = Loss()
    model.teacher = Net().requires_grad_(False)
    model.blocks[0].up = nn.Sequential(model.blocks[0].up)
    model.blocks[2].up = torch.compile(model.blocks[2].up, backend="eager")
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.blocks[1])
    for tokens in next(data(rank, 1, 2)):
        losses = [each(tokens) for each in (plain, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert same(grads_of(model), grads_of(plain))


@on_ranks(2)
def test_a_layer_of_a_unit_is_not_copied(rank: int) -> None:
    for model in (flat(), shard(Net())):
        with model.summon_full_params(), pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(model.head)


@on_ranks(2)
def test_plain_modules_around_units_may_change(rank: int) -> None:
    whole = nn.Module()
    whole.net = shard(Net())
    whole.value_head = nn.Linear(2, 2)
    whole.net = shard(Net())
    whole.net = nn.Identity()
