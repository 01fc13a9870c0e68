"""A parameter may be frozen by itself after its model was sharded in place, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.twins import Microbatch, Twins, slot_net

OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
        for flag in (False, True)
        for reshard in (False, True)
    ],
    ids=["off zero2", "off zero3", "on zero2", "on zero3"],
)
USES = ({0: (0, 1), 1: (0,)}, {0: (1,), 1: (0,)})
STEP = [Microbatch(USES), Microbatch(USES, head=1)]
NAMES = [name for name, _ in slot_net().named_parameters()]
MATRICES = [name for name in NAMES if name.endswith("weight")]
"""What is not a bias, a scale or a shift."""


@OPTIONS
@pytest.mark.parametrize("kind", ["torch AdamW", "our AdamW", "our SGD"])
@on_ranks(1, 2)
def test_biases_first_and_then_all(kind: str, options: dict[str, Any]) -> None:
    twins = Twins(slot_net(), kind, **options)
    for frozen in (MATRICES, MATRICES, [], []):
        twins.freeze(frozen)
        twins.step(STEP)
        twins.zero_grad()


@OPTIONS
@pytest.mark.parametrize("kind", ["torch SGD nesterov", "our AdamW"])
@on_ranks(1, 2)
def test_parameters_frozen_for_a_while_keep_their_state(kind: str, options: dict[str, Any]) -> None:
    """Frozen by themselves, one after the other, until all of a unit is frozen, and back."""
    twins = Twins(slot_net(), kind, **options)
    unit = [name for name in NAMES if name.startswith("units.0.")]
    for frozen in ([], unit[:1], unit[:3], unit, unit[1:], ["heads.0.bias", *unit[::2]], []):
        twins.freeze(frozen)
        twins.step(STEP)
        twins.zero_grad()


@OPTIONS
@on_ranks(1, 2)
def test_what_is_frozen_neither_moves_nor_has_a_gradient(options: dict[str, Any]) -> None:
    for kind in ("torch AdamW", "our AdamW"):
        twins = Twins(slot_net(), kind, **options)
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
        twins.step(STEP)
        twins.zero_grad()


@OPTIONS
@on_ranks(1, 2)
def test_a_model_that_was_sharded_with_frozen_parameters_is_unfrozen(options: dict[str, Any]) -> None:
    net = slot_net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in MATRICES)
    twins = Twins(net, "torch AdamW", **options)
    for frozen in (MATRICES, MATRICES[1:], [], ["units.0.scale"]):
        twins.freeze(frozen)
        twins.step(STEP)
        twins.zero_grad()
