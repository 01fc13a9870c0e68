"""A parameter may be frozen by itself after its model was sharded in place, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.twins import Microbatch, Twins, slot_net

SETUPS: list[dict[str, Any]] = [
    {"kind": "torch AdamW", "optimize_backward_concat": True},
    {"kind": "our AdamW", "optimize_backward_concat": False},
    {"kind": "our SGD", "optimize_backward_concat": True, "reshard_after_forward": False},
    {"kind": "torch SGD nesterov", "optimize_backward_concat": False, "reshard_after_forward": False},
    {"kind": "our AdamW", "optimize_backward_concat": True, "grad_sync": "every"},
]
SETUP = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: " ".join(map(str, setup.values())))

USES = ({0: (0, 1), 1: (0,)}, {0: (1,), 1: (0,)})
STEP = [Microbatch(USES), Microbatch(USES, head=1)]
NAMES = [name for name, _ in slot_net().named_parameters()]
MATRICES = [name for name in NAMES if name.endswith("weight")]
"""What is not a bias, a scale or a shift."""


UNIT = [name for name in NAMES if name.startswith("units.0.")]
SCHEDULES: dict[str, list[list[str]]] = {
    "biases first": [MATRICES, MATRICES, [], []],
    "one after the other": [[], UNIT[:1], UNIT[:3], UNIT, UNIT[1:], ["heads.0.bias", *UNIT[::2]], []],
    "sharded frozen": [MATRICES, MATRICES[1:], [], ["units.0.scale"]],
}
"""What is frozen in each step; optimizers keep the states of what is frozen for a while."""


@SETUP
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(1, 2)
def test_training_is_that_of_plain_pytorch(setup: dict[str, Any], schedule: str) -> None:
    net = slot_net()
    if schedule == "sharded frozen":
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name not in MATRICES)
    twins = Twins(net, **setup)
    for frozen in SCHEDULES[schedule]:
        twins.freeze(frozen)
        twins.train(STEP)


@SETUP
@on_ranks(1, 2)
def test_what_is_frozen_neither_moves_nor_has_a_gradient(setup: dict[str, Any]) -> None:
    twins = Twins(slot_net(), **setup)
    named = dict(twins.ours.named_parameters())
    twins.freeze(MATRICES)
    before = {name: named[name].detach().clone() for name in MATRICES}
    for _ in range(2):
        twins.backward(STEP)
        assert {name for name, p in named.items() if p.grad is None} == set(MATRICES)
        twins.update()
        twins.zero_grad()
    assert all(torch.equal(named[name], value) for name, value in before.items())
    assert not any(named[name] in twins.optimizer.state for name in MATRICES)


@pytest.mark.parametrize("update", ["torch clips", "model clips", "optimizer clips"])
@on_ranks(2)
def test_norms_leave_out_what_is_frozen(update: Any) -> None:
    twins = Twins(slot_net(), "our AdamW", update=update)
    for frozen in (["units.0.scale", "inlet.bias"], []):
        twins.freeze(frozen)
        twins.train(STEP)
