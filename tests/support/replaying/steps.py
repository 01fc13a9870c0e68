"""What happens in a training whose microbatches may be replayed, and what it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flatfsdp import microbatches, replayed
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.optim import SGD, AdamW
from tests.support.fp8_layers import TOKENS
from tests.support.replaying.cases import Case

Event = Callable[[Case, Any, torch.optim.Optimizer], torch.optim.Optimizer | None]
"""What may happen to a model and its optimizer after a step; may return an optimizer that takes its place."""


class Step(NamedTuple):
    """Attributes:
    count: microbatches.
    tokens: of each.
    event: what happens after it.
    """

    count: int
    tokens: int = TOKENS
    event: Event | None = None


def steps_of(case: Case, event: Event | None = None, steps: int = 9) -> list[Step]:
    """Steps that are all alike, with an event after the fifth and the seventh."""
    return [Step(case.count, event=event if index in (4, 6) else None) for index in range(steps)]


def random_steps(seed: int, steps: int = 14) -> list[Step]:
    """Any number of microbatches, of two lengths, and anything in between.

    Most steps are as the one before and nothing comes between: else nothing would be replayed.
    """
    choose = random.Random(seed)
    found: list[Step] = []
    count, tokens = choose.randint(1, 4), TOKENS
    for _ in range(steps):
        if choose.random() < 0.1:
            count, tokens = choose.randint(1, 4), choose.choice((TOKENS, TOKENS // 2))
        event = choose.choice(list(EVENTS.values())) if choose.random() < 0.3 else None
        found.append(Step(count, tokens, event))
    return found


class Trained(NamedTuple):
    """Attributes:
    losses: of all microbatches.
    state: gradients of all steps, parameters and moments.
    step: the function that was called for each microbatch.
    """

    losses: list[Tensor]
    state: list[Tensor]
    step: Any

    def has_bits_of(self, other: Trained) -> bool:
        return all(
            len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
            for ours, theirs in zip(self[:2], other[:2], strict=True)
        )


def trained(case: Case, rank: int, replays: bool, steps: Sequence[Step], device: str = "cpu") -> Trained:
    torch.manual_seed(rank)
    model = case.model(device)
    optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=1e-2)
    run = case.microbatch(model)
    step = replayed(model, run) if replays else run
    found, grads = [], []
    for index, (count, tokens, event) in enumerate(steps):
        batches = [case.batch(rank, index, m, tokens, device) for m in range(count)]
        found += [step(x) for x in microbatches(model, batches)]
        grads += [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if event is not None:
            optimizer = event(case, model, optimizer) or optimizer
    state = [
        value for of_one in optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)
    ]
    return Trained(found, [*grads, *(p.detach().clone() for p in model.parameters()), *state], step)


def evaluation(case: Case, model: Any, _optimizer: Any) -> None:
    model.eval()
    with torch.no_grad():
        case.loss(model, case.batch(0, 0, 0, device=device_of(model)))
    model.train()


def load(_case: Case, model: Any, _optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write(_case: Case, model: Any, _optimizer: Any) -> None:
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def failure(case: Case, model: Any, _optimizer: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        case.loss(model, case.batch(0, 0, 0, device=device_of(model))) / (1 // 0)


def other_mode(_case: Case, model: Any, _optimizer: Any) -> None:
    model.train(not model.training)


def frozen(_case: Case, model: Any, _optimizer: Any) -> None:
    """Or trained again."""
    first = next(each for each in model.modules() if hasattr(each, "fsdp_state") and each is not model)
    group = next(group for _, group in named_groups(first))
    first.requires_grad_(not group.trains)


def other_rate(_case: Case, _model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.7


def other_optimizer(_case: Case, model: Any, optimizer: Any) -> torch.optim.Optimizer:
    kind = SGD if isinstance(optimizer, AdamW) else AdamW
    return kind(model.parameters(), lr=1e-2)


def device_of(model: Any) -> str:
    return str(next(model.parameters()).device)


EVENTS: dict[str, Event] = {
    each.__name__: each
    for each in (evaluation, load, write, failure, other_mode, frozen, other_rate, other_optimizer)
}
