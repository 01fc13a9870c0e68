"""What no rank has used in a step is not touched: no gradient, no decay, no momentum, no step count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import shard
from flatfsdp.optim import AdamW
from tests.support.models import FLAGS
from tests.support.ranks import on_ranks
from tests.support.twins import WIDTH, Microbatch, Twins, slot_net

ON: dict[str, Any] = {"optimize_backward_concat": True}
OFF: dict[str, Any] = {"optimize_backward_concat": False, "reshard_after_forward": False}
EVERY: dict[str, Any] = {**ON, "reshard_after_forward": False, "grad_sync": "every"}

SETUPS: list[dict[str, Any]] = [
    {"kind": "torch SGD single", **ON},
    {"kind": "torch SGD nesterov", "update": "torch clips", **EVERY},
    {"kind": "torch AdamW fused", "update": "model clips", **OFF},
    {"kind": "our SGD", **OFF},
    {"kind": "our SGD nesterov", "update": "optimizer clips", **EVERY},
    {"kind": "our AdamW", **EVERY},
    {"kind": "our AdamW", "update": "optimizer clips", **ON},
    {"kind": "our AdamW", "groups": True, **OFF},
]


def using(*uses: Mapping[int, Sequence[int]], head: int = 0) -> Microbatch:
    """A microbatch in which each rank uses other slots, or all the same."""
    return Microbatch(uses, head)


EXPERTS = [[using({number: (0,)})] for number in (0, 1, 2, 0)]
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


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [*((2, setup) for setup in SETUPS), *((1, setup) for setup in SETUPS[-3:])],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
@on_ranks()
def test_what_idles_stays_as_in_plain_pytorch(setup: dict[str, Any]) -> None:
    for slots, steps in PROGRAMS.values():
        twins = Twins(slot_net(slots), **setup)
        for number, step in enumerate(steps):
            twins.train(step, by_no_sync=number % 2 == 1)


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


@pytest.mark.parametrize(("world_size", "options"), [(1, EVERY), (2, ON), (2, OFF), (2, EVERY)])
@on_ranks()
def test_gradients_of_an_earlier_step_stay_where_nothing_is_added(options: dict[str, Any]) -> None:
    kept, zeroed = (Twins(slot_net((3, 1)), "torch AdamW", **options) for _ in range(2))
    for step in SLOTS[:4]:
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


# ---- gradients that are zeroed, asked for or penalised between microbatches, while parameters idle -------


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
