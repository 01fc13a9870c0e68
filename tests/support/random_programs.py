"""Random programs: slots and units that idle, penalties, freezing; against the plain model, step by step.

A seed draws a program (`drawn`), and every rank runs it with `Twins`, which compare gradients, weights,
moments and step counts after every step.  The suite runs some of them; for more:

    python -m tests.support.random_programs --cases 300
    python -m tests.support.random_programs --first 17 --cases 1
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import typer

from flatfsdp import by_class, by_size
from tests.support.ranks import RankFailure, run_ranks
from tests.support.twins import Microbatch, Penalty, Slots, Twins, Update, slot_net

Zeroing = Literal["none", "zeros", "nothing"]
"""What is done to gradients after a step: None, zeros, or nothing, so that the next step adds to them."""


class Step(NamedTuple):
    """One step: the parameters or modules that are frozen in it, and its microbatches."""

    frozen: Sequence[str]
    microbatches: Sequence[Microbatch]
    zeroing: Zeroing = "none"
    by_no_sync: bool = False


class Program(NamedTuple):
    """A model, how it is sharded, its optimizer, and what is trained.

    Attributes:
        slots: number of slots of each unit.
        min_numel: for `by_size`; 0 for `by_class`.
        setup: arguments of `Twins`.
    """

    seed: int
    ranks: int
    slots: Sequence[int]
    min_numel: int
    setup: dict[str, Any]
    steps: Sequence[Step]

    def __str__(self) -> str:
        steps = "; ".join(", ".join(map(str, step)) for step in self.steps)
        units = f"by_size({self.min_numel})" if self.min_numel else "by_class"
        return f"seed {self.seed}, {self.ranks} ranks, {self.slots} slots {units}, {self.setup}: {steps}"


EACH_LAYER, EACH_SEVERAL = 20, 30
"""Sizes by which every layer is a unit, or a module of several slots."""


def drawn(seed: int) -> Program:
    """The program of this seed; it runs on one rank, or, with an odd seed, on two."""
    return _Draw(seed).program()


class _Draw:
    """Draws one program, from the outside to the inside."""

    def __init__(self, seed: int) -> None:
        self._seed, self._ranks = seed, 1 + seed % 2
        self._random = random.Random(seed)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _some(self, values: Sequence[Any], probability: float = 0.6) -> list[Any]:
        return [value for value in values if self._chance(probability)]

    def program(self) -> Program:
        choose = self._random.choice
        self._slots = [2, *(choose((1, 2, 3)) for _ in range(choose((1, 2))))]
        self._min_numel = choose((0, 0, EACH_LAYER, EACH_SEVERAL))
        kinds = ("torch SGD", "torch SGD nesterov", "torch AdamW", "our SGD", "our SGD nesterov", "our AdamW")
        kind = choose(kinds)
        updates = [each for each in get_args(Update) if each != "optimizer clips" or kind.startswith("our")]
        setup = {
            "kind": kind,
            "update": "step" if self._chance(0.4) else choose(updates),
            "decay": choose((0.0, 0.1)),
            "groups": self._chance(0.3),
            "optimize_backward_concat": self._chance(0.5),
            "reshard_after_forward": self._chance(0.5),
            "grad_sync": choose(("last", "last", "every")),
        }
        names = [name for name, _ in slot_net(self._slots).named_parameters()]
        units = [f"units.{number}" for number in range(len(self._slots))]
        # Something stays trained in every loss.
        candidates = [n for n in names if n != "inlet.weight"] + units
        freezes, penalizes = self._chance(0.4), self._chance(0.5)
        steps: list[Step] = []
        for _ in range(choose((3, 4))):
            frozen = steps[-1].frozen if steps else []
            if freezes and self._chance(0.6):
                frozen = self._random.sample(candidates, min(len(candidates), choose((0, 1, 2, 4))))
            parts = [""] if freezes else names
            steps.append(
                Step(frozen, self._microbatches(parts if penalizes else []), "none", self._chance(0.3))
            )
        # Optimizers step what has a gradient, also if it is frozen now; some clip without a trace in `.grad`.
        if not freezes and setup["update"] in ("step", "torch clips", "model clips"):
            zeroings = ("none", "none", "zeros", "nothing")
            steps = [step._replace(zeroing=choose(zeroings)) for step in steps]
        return Program(self._seed, self._ranks, self._slots, self._min_numel, setup, steps)

    def _microbatches(self, penalized: Sequence[str]) -> list[Microbatch]:
        """Those of one step, in which some slots and units may idle.

        Args:
            penalized: parts of the names of what a penalty may be of; empty if there is none.
        """
        units = self._some(range(len(self._slots)), 0.7)
        slots = {unit: self._some(range(self._slots[unit])) for unit in units}
        heads = self._random.choice(([0], [0], [1], [0, 1]))
        found = []
        for _ in range(self._random.choice((1, 1, 2, 3, 4))):
            # Ranks gather the same units, so only slots may differ, and only if they are no units.
            running = self._some(units, 0.8)
            uses = [{unit: self._some(slots[unit], 0.8) for unit in running} for _ in range(self._ranks)]
            if self._min_numel == EACH_LAYER:
                uses = uses[:1]
            penalty = None
            if penalized and self._chance(0.6):
                only = self._random.choice(("", self._random.choice(penalized)))
                penalty = Penalty(self._random.choice((0.0, 0.1)), self._chance(0.5), only)
            order = self._random.choice(("together", "together", "before", "after"))
            found.append(Microbatch(uses, self._random.choice(heads), penalty, order))
        return found


def run_on_rank(rank: int, world_size: int, program: Program) -> str:
    """What differs from plain, the same on all ranks; empty if nothing does."""
    policy = by_size(program.min_numel) if program.min_numel else by_class(Slots)
    twins = Twins(slot_net(program.slots), policy=policy, **program.setup)
    for number, step in enumerate(program.steps):
        twins.freeze(step.frozen)
        try:
            twins.step(step.microbatches, by_no_sync=step.by_no_sync)
        except AssertionError as problem:  # the same on all ranks, which go on together; no other error is
            return f"step {number}: {problem}"
        if step.zeroing != "nothing":
            twins.zero_grad(set_to_none=step.zeroing == "none")
    return ""


def difference(program: Program) -> str:
    """What differs from plain, or which errors were raised; empty if nothing is wrong."""
    try:
        return run_ranks(program.ranks, run_on_rank, program, timeout=60)[0]
    except RankFailure as failure:
        return str(failure)


def main(cases: int = 300, first: int = 0) -> None:
    """Runs programs of consecutive seeds, and prints those that differ from plain PyTorch."""
    differ = 0
    for seed in range(first, first + cases):
        program = drawn(seed)
        if problem := difference(program):
            differ += 1
            print(f"{program}\n    {problem.strip().splitlines()[-1]}", flush=True)
    print(f"{cases} programs, {differ} differ from plain PyTorch")
    raise typer.Exit(differ > 0)


if __name__ == "__main__":
    typer.run(main)
