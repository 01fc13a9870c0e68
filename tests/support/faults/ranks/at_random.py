"""Random programs, with one fault in each: all ranks are right, or all that live are told.

In:   a seed; each trial has a number, and can be repeated by both.
Out:  a `Trial` and what became of it, one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tests.support.faults.ranks.program import Do, Microbatch, Operation, Setup, Step
from tests.support.faults.ranks.trials import Result, begun

SHORT, LONG = 0.3, 5.0
"""Seconds that a rank is late: less and more than the others wait, with time to write down who is missing."""

TIMEOUT = 2.0


@dataclass(frozen=True)
class Trial:
    """One training with one fault.

    Attributes:
        fault: what the odd rank does.
        odd: which one it is.
        programs: of each rank.
        has_to_be_right: whether nothing differs but the time that it takes.
    """

    fault: str
    odd: int
    setup: Setup
    programs: tuple[tuple[Operation, ...], ...]
    has_to_be_right: bool

    def begun(self) -> Callable[[], Result]:
        """Begins; the result waits until all ranks have ended."""
        programs = [list(each) for each in self.programs]
        waiting = begun([self.setup] * len(programs), programs, self.odd)

        def result() -> Result:
            found, verdict = waiting()
            if verdict == "named" and self.has_to_be_right:
                verdict = "false alarm"
            return found, verdict

        return result

    def run(self) -> Result:
        """How all ranks end, and what that is worth."""
        return self.begun()()


Fault = Callable[[list[Operation], random.Random], list[Operation]]


def _before_some(what: Do) -> Fault:
    """Something extra before a random operation that is not among the first step's."""

    def faulty(program: list[Operation], chance: random.Random) -> list[Operation]:
        at = chance.randrange(_second_step(program), len(program))
        return [*program[:at], what, *program[at:]]

    return faulty


def _without_some(kind: type[Operation]) -> Fault:
    def faulty(program: list[Operation], chance: random.Random) -> list[Operation]:
        at = _some(program, kind, chance)
        return [*program[:at], *program[at + 1 :]]

    return faulty


def _with_some(kind: type[Operation], **changes: object) -> Fault:
    def faulty(program: list[Operation], chance: random.Random) -> list[Operation]:
        at = _some(program, kind, chance)
        return [*program[:at], replace(program[at], **changes), *program[at + 1 :]]  # type: ignore[arg-type]

    return faulty


def _another_order(program: list[Operation], chance: random.Random) -> list[Operation]:
    orders = [(2, 1, 0), (1, 0, 2), (0, 2, 1), (0, 2), (1, 2), (0, 1, 1, 2)]
    return _with_some(Microbatch, order=chance.choice(orders))(program, chance)


def _one_more(program: list[Operation], chance: random.Random) -> list[Operation]:
    at = _some(program, Microbatch, chance)
    return [*program[:at], Microbatch(77), *program[at:]]


def _less_of_the_end(program: list[Operation], chance: random.Random) -> list[Operation]:
    return program[: chance.randrange(_second_step(program), len(program))]


def _nothing(program: list[Operation], chance: random.Random) -> list[Operation]:
    return program


FAULTS: dict[str, Fault] = {
    "nothing": _nothing,
    "late, within the time limit": _before_some(Do("sleep", SHORT)),
    "late in a collective": _before_some(Do("slow gather", SHORT)),
    "too late": _before_some(Do("sleep", LONG)),
    "too late in a collective": _before_some(Do("slow gather", LONG)),
    "stopped": _before_some(Do("stop")),
    "killed": _before_some(Do("kill")),
    "exits": _before_some(Do("exit")),
    "raises": _before_some(Do("raise")),
    "raises in a forward": _with_some(Microbatch, raises="forward"),
    "raises in a backward": _with_some(Microbatch, raises="backward"),
    "catches an exception in a forward": _with_some(Microbatch, raises="forward", is_caught=True),
    "catches, and calls zero_grad()": _with_some(Microbatch, raises="forward", is_caught=True, zeroes=True),
    "catches an exception in a backward": _with_some(Microbatch, raises="backward", is_caught=True),
    "skips a microbatch": _without_some(Microbatch),
    "one more microbatch": _one_more,
    "uses no parameter": _with_some(Microbatch, is_used=False),
    "another order": _another_order,
    "ends early": _less_of_the_end,
    "state dict": _before_some(Do("state dict")),
    "evaluates": _before_some(Do("evaluate")),
    "summons": _before_some(Do("summon")),
    "clips": _before_some(Do("clip")),
    "saves": _before_some(Do("save", path="never written")),
}

HARMLESS = {"nothing", "late, within the time limit"}


def _some(program: list[Operation], kind: type[Operation], chance: random.Random) -> int:
    start = _second_step(program)
    return chance.choice([at for at in range(start, len(program)) if isinstance(program[at], kind)])


def _second_step(program: list[Operation]) -> int:
    """Index of its first operation: in the first step ranks wait for longer."""
    return next(at for at, each in enumerate(program) if isinstance(each, Step)) + 1


def trial(seed: int, number: int) -> Trial:
    """The trial of this number."""
    chance = random.Random(f"{seed} {number}")
    ranks = chance.choice([2, 2, 2, 3, 4])
    setup = Setup(
        reshard=chance.random() < 0.6,
        flag=chance.random() < 0.5,
        grad_sync=chance.choice(["last", "last", "every"]),
        compute=torch.float32,
        hybrid=ranks == 4 and chance.random() < 0.5,
        timeout=TIMEOUT,
    )
    microbatches, clips = chance.choice([1, 2, 3]), chance.random() < 0.5
    usual: list[Operation] = []
    for step in range(3):
        usual += [Microbatch(10 * step + index) for index in range(microbatches)]
        usual.append(Step(clips=clips))
    # Each kind as often, in an order of their own.
    fault = list(FAULTS)[number % len(FAULTS)]
    odd = chance.randrange(ranks)
    programs = [tuple(usual) for _ in range(ranks)]
    programs[odd] = tuple(FAULTS[fault](usual, chance))
    return Trial(fault, odd, setup, tuple(programs), fault in HARMLESS)
