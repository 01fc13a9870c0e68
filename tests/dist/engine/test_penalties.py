"""Penalties on listed parameters, and parameters that are frozen by themselves, train as in plain PyTorch.

Autograd writes the gradient of a penalty to `.grad` by itself, while those of the loss are accumulated
elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import shard
from tests.support.ranks import on_ranks
from tests.support.twins import Microbatch, Penalty, Twins, Update, slot_net

NONE, L2, ZERO, PROXIMAL = None, Penalty(0.05), Penalty(0.0), Penalty(0.1, from_start=True)


def each(*penalties: Penalty | None, **options: Any) -> list[Microbatch]:
    """A step: microbatches with these penalties."""
    return [Microbatch(penalty=penalty, **options) for penalty in penalties]


PROGRAMS: dict[str, list[list[Microbatch]]] = {
    "annealed, from zero": [each(ZERO, ZERO, ZERO), each(L2, L2, L2), each(ZERO, ZERO)],
    "proximal, zero in the first step": [each(*[PROXIMAL] * 4), each(PROXIMAL, PROXIMAL)],
    "in the only microbatch": [each(L2), each(ZERO)],
    "in the first microbatch": [each(L2, NONE, NONE), each(ZERO, NONE)],
    "in the middle microbatch": [each(NONE, L2, NONE), each(NONE, ZERO, NONE)],
    "in the last microbatch": [each(NONE, NONE, L2), each(NONE, ZERO)],
    "of one element": [each(*[Penalty(0.5, only="scale")] * 3), each(NONE, Penalty(0.5, only="scale"))],
    "of a parameter that is zero": [each(*[Penalty(0.5, only="shift")] * 3), each(NONE, L2)],
    "of what no loss uses": [
        each(NONE, Penalty(0.5, only="heads.1")),
        each(*[Penalty(0.0, only="heads.1")] * 2),
    ],
    "alone, before the loss": [each(L2, L2, order="before"), each(NONE, ZERO, order="before")],
    "alone, after the loss": [each(L2, L2, order="after"), each(ZERO, NONE, order="after")],
}
SETUPS: list[dict[str, Any]] = [
    {"kind": "torch SGD", "optimize_backward_concat": True},
    {"kind": "our AdamW", "optimize_backward_concat": False, "reshard_after_forward": False},
    {"kind": "our SGD nesterov", "optimize_backward_concat": True, "grad_sync": "every"},
]
LAST_ONLY, ANNEALED = PROGRAMS["in the last microbatch"], PROGRAMS["annealed, from zero"]


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(1, 2)
def test_a_penalty_trains_as_in_plain_pytorch(world_size: int, program: str) -> None:
    """On one rank, and in every microbatch; on two also with one of the setups that reduce in the last."""
    setups = SETUPS[-1:] if world_size == 1 else [SETUPS[list(PROGRAMS).index(program) % 2], SETUPS[-1]]
    for setup in setups:
        Twins(slot_net(), **setup).train(*PROGRAMS[program])


@on_ranks(1, 2)
def test_a_rank_whose_part_is_zero_keeps_what_it_has_accumulated() -> None:
    """Only one rank's penalty is zero in all of a unit: no rank may take that for a `zero_grad()`."""
    for setup in SETUPS:
        net = slot_net()
        with torch.no_grad():
            for parameter in (net.units[0].scale, net.units[0].shift, *net.units[0].layers[0].parameters()):
                parameter.zero_()
        Twins(net, **setup).train(*LAST_ONLY, *ANNEALED)


@pytest.mark.parametrize("update", ["torch clips", "model clips", "optimizer clips", "scaler"])
@on_ranks(1, 2)
def test_norms_and_scalers_count_the_penalty(update: Update) -> None:
    """The gradient of a unit that idles is the penalty's alone, perhaps there before the first forward."""
    idle = [
        [each(Penalty(0.5, only="units.1"), uses=({0: (0,)},), order=order)] * 2
        for order in ("together", "before", "after")
    ]
    for program in (LAST_ONLY, ANNEALED, *idle):
        Twins(slot_net(), "our AdamW", update=update).train(*program)


@on_ranks(1, 2)
def test_gradients_of_an_earlier_step_are_added_to() -> None:
    """Without `zero_grad()`, or with zeros in their place, the penalty meets gradients that are there."""
    for setup in SETUPS:
        for zeroes in (False, True):
            twins = Twins(slot_net(), **setup)
            for step in (each(NONE, ZERO), each(L2, NONE), each(NONE, NONE, L2)):
                twins.step(step)
                if zeroes:
                    twins.zero_grad(set_to_none=False)


@on_ranks(2)
def test_a_penalty_under_no_sync() -> None:
    for setup in SETUPS:
        Twins(slot_net(), **setup).train(*LAST_ONLY, *ANNEALED, by_no_sync=True)


@on_ranks(2)
def test_the_penalty_is_not_divided_by_the_number_of_ranks(rank: int) -> None:
    """Each rank's part gets its own gradient, once a microbatch; here without the plain model."""
    without, found = (Twins(slot_net(), "torch SGD") for _ in range(2))
    without.backward(each(NONE, NONE))
    found.backward(each(L2, L2))
    for parameter, other in zip(found.ours.parameters(), without.ours.parameters(), strict=True):
        expected = 2 * 2 * L2.weight * other.detach()
        if other.grad is not None:
            expected += other.grad.as_subclass(torch.Tensor)
        torch.testing.assert_close(parameter.grad.as_subclass(torch.Tensor), expected)


def test_the_norm_of_a_penalty_before_the_first_forward_raises() -> None:
    """Nobody knows yet which ranks have the other parts."""
    (weight,) = shard(nn.Linear(3, 2, bias=False)).parameters()
    weight.pow(2).sum().backward()
    with pytest.raises(RuntimeError, match="before the model's first forward"):
        weight.grad.norm()
    assert torch.equal(weight.grad.as_subclass(torch.Tensor), 2 * weight.detach())


# ---- parameters that are frozen by themselves, after their model was sharded -----------------------------


FREEZING: list[dict[str, Any]] = [
    {"kind": "torch AdamW single", "optimize_backward_concat": True},
    {"kind": "our AdamW", "optimize_backward_concat": False},
    {"kind": "our SGD", "optimize_backward_concat": True, "reshard_after_forward": False},
    {
        "kind": "torch SGD nesterov",
        "groups": True,
        "update": "model clips",
        "optimize_backward_concat": False,
        "reshard_after_forward": False,
    },
    {"kind": "our AdamW", "optimize_backward_concat": True, "grad_sync": "every"},
]
SETUP = pytest.mark.parametrize("setup", FREEZING, ids=lambda setup: " ".join(map(str, setup.values())))

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
