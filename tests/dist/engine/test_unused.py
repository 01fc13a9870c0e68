"""What no rank has used in a step is not touched: no gradient, no decay, no momentum, no step count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import on_ranks
from tests.support.twins import WIDTH, Microbatch, Twins, slot_net

ON: dict[str, Any] = {"optimize_backward_concat": True}
OFF: dict[str, Any] = {"optimize_backward_concat": False, "reshard_after_forward": False}
EVERY: dict[str, Any] = {**ON, "reshard_after_forward": False, "grad_sync": "every"}

SETUPS: list[dict[str, Any]] = [
    {"kind": "torch SGD", **ON},
    {"kind": "torch SGD nesterov", "update": "torch clips", **EVERY},
    {"kind": "torch AdamW", "update": "model clips", **OFF},
    {"kind": "our SGD", **OFF},
    {"kind": "our SGD nesterov", "update": "optimizer clips", **EVERY},
    {"kind": "our AdamW", **EVERY},
    {"kind": "our AdamW", "update": "optimizer clips", **ON},
    {"kind": "our AdamW", "groups": True, **OFF},
]


def using(*uses: Mapping[int, Sequence[int]], head: int = 0) -> Microbatch:
    """A microbatch in which each rank uses other slots, or all the same."""
    return Microbatch(uses, head)


EXPERTS = [[using({number: (0,)})] for number in (0, 1, 2, 2, 0, 0)]
"""Three experts as units, one of them in each step."""

ALTERNATING = [[using({0: (0,)}, head=step % 2), using({1: (0,)}, head=step % 2)] for step in range(4)]
"""One of two heads in each step, as with two objectives."""

SLOTS = [
    [using({0: (0, 1), 1: (0,)})],
    [using({0: (0,), 1: ()})],
    [using({0: (1,)}), using({0: (2,)}), using({0: ()})],
    [using({1: (0,)}), using({0: ()})],
    [using({0: (2,)}), using({0: (1,)}, head=1)],
]
"""Slots that idle in some steps, and microbatches that use different ones."""

BY_RANK = [
    [using({0: (0,)}, {0: (1,)})],
    [using({0: (0,), 1: ()}, {0: (), 1: (0,)}), using({0: ()}, {0: (2,)})],
    [using({0: (1,), 1: ()}, {0: (1,), 1: ()})],
]
"""Slots that only one rank uses."""

PROGRAMS: dict[str, tuple[Sequence[int], list[list[Microbatch]]]] = {
    "experts as units": ((1, 1, 1), EXPERTS),
    "heads in turn": ((1, 1), ALTERNATING),
    "slots that idle": ((3, 1), SLOTS),
    "used by one rank": ((3, 1), BY_RANK),
}


def train(twins: Twins, steps: Sequence[Sequence[Microbatch]]) -> None:
    for number, step in enumerate(steps):
        twins.train(step, by_no_sync=number % 2 == 1)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: " ".join(map(str, setup.values())))
@on_ranks(2)
def test_what_idles_stays_as_in_plain_pytorch(setup: dict[str, Any]) -> None:
    for slots, steps in PROGRAMS.values():
        train(Twins(slot_net(slots), **setup), steps)


@pytest.mark.parametrize("setup", SETUPS[-3:], ids=lambda setup: " ".join(map(str, setup.values())))
@on_ranks(1)
def test_what_idles_on_one_rank(setup: dict[str, Any]) -> None:
    for slots, steps in PROGRAMS.values():
        train(Twins(slot_net(slots), **setup), steps)


@pytest.mark.parametrize("kind", ["torch AdamW", "our AdamW", "our SGD"])
@on_ranks(1, 2)
def test_what_was_never_used_has_no_state_and_does_not_decay(kind: str) -> None:
    for options in (ON, OFF, EVERY):
        twins = Twins(slot_net(), kind, **options)
        named = dict(twins.ours.named_parameters())
        idle = [name for name in named if name.startswith(("units.1.", "units.0.layers.1.", "heads.1."))]
        before = {name: named[name].detach().clone() for name in idle}
        for _ in range(2):
            twins.backward([using({0: (0,)}), using({0: (0,)})])
            assert [name for name, p in named.items() if p.grad is None] == idle
            twins.update()
            twins.zero_grad()
        assert not any(named[name] in twins.optimizer.state for name in idle)
        assert all(torch.equal(named[name], value) for name, value in before.items())


@on_ranks(1, 2)
def test_gradients_of_an_earlier_step_stay_where_nothing_is_added() -> None:
    for options in (ON, OFF, EVERY):
        kept, zeroed = (Twins(slot_net((3, 1)), "torch AdamW", **options) for _ in range(2))
        for step in SLOTS:
            kept.step(step)
            zeroed.step(step)
            # Zeros are gradients: they decay.
            zeroed.zero_grad(set_to_none=False)


class Inner(NamedTuple):
    """A microbatch that calls a unit by itself, so that the root's own parameters idle."""

    unit: int
    penalty: None = None
    order: str = "together"

    def loss(self, model: nn.Module, rank: int, place: tuple[int, int]) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(hash((rank, *place))))
        return model.units[self.unit](x, (0,)).square().mean()


@on_ranks(1, 2)
def test_a_unit_that_is_called_alone_trains_alone() -> None:
    for options in (ON, OFF, EVERY):
        twins = Twins(slot_net((1, 1)), "torch AdamW", **options)
        twins.train([using({0: (0,), 1: (0,)})], [Inner(1)], [Inner(0), Inner(0)])
