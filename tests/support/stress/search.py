"""Stress test: random models, trained in random ways; see `plans.py` for what is varied.

Each plan is trained three times from the same seed (`training.py`):

    FlatFSDP, flag off  ==  FlatFSDP, flag on     bit for bit, on every rank
    FlatFSDP            ~   the plain model, on all ranks' data in one process

CI runs some of them (`dist/engine/test_stress.py`).  For more, and to find the smallest plan that fails:

    python -m tests.support.stress --examples 5000 --ranks 2 --seed 1
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import hypothesis
import typer
from hypothesis import HealthCheck, given, settings

from tests.support.progress import Progress
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stress.plans import Plan, plans
from tests.support.stress.training import Verdict, check_on_rank

HANG_SECONDS = 60.0
"""Longer than the time limit of the pools' collectives, so that a rank that is stuck can say where."""


class Judge:
    """Runs plans on pools of ranks, and remembers the last one that failed.

    A hang costs half a minute and a new pool.  After `max_hangs` of them every new plan passes, so that
    hypothesis stops to look for a smaller one.

    Attributes:
        failed: the last plan that failed, and why.
    """

    def __init__(self, max_hangs: int = 1) -> None:
        self.failed: tuple[Plan, str] | None = None
        self._max_hangs = max_hangs
        self._hangs: dict[Plan, str] = {}

    def __call__(self, plan: Plan) -> None:
        """Raises AssertionError if the plan fails."""
        gave_up = plan in self._hangs or len(self._hangs) >= self._max_hangs
        problem = self._hangs.get(plan, "") if gave_up else self._run(plan)
        if problem:
            self.failed = plan, problem
            raise AssertionError(f"{plan}\n{problem}")

    def _run(self, plan: Plan) -> str:
        """What is wrong on each rank; empty if nothing is."""
        if plan.ranks == 1:
            return check_on_rank(0, 1, plan).problem
        # A new pool takes seconds to start.
        run_ranks(plan.ranks, _wake)
        try:
            verdicts = run_ranks(plan.ranks, check_on_rank, plan, timeout=HANG_SECONDS)
        except RankFailure as hang:
            self._hangs[plan] = str(hang)
            return str(hang)
        problem = "\n".join(f"rank {r}: {v.problem}" for r, v in enumerate(verdicts) if v.problem)
        if not _ended_together(verdicts):
            self._hangs[plan] = problem
            with suppress(RankFailure):
                run_ranks(plan.ranks, _stop)
        return problem


def _ended_together(verdicts: list[Verdict]) -> bool:
    """Whether the ranks' next collectives will match.

    Not if a collective failed, or if one rank left with an exception where the others went on.
    """
    in_collective = any(v.broken_off_by and "gloo" in v.problem for v in verdicts)
    return len({v.broken_off_by for v in verdicts}) == 1 and not in_collective


def _wake(rank: int, world_size: int) -> None:
    pass


def _stop(rank: int, world_size: int) -> None:
    raise RuntimeError("a new pool, please")


def search(
    ranks: int,
    examples: int,
    judge: Judge,
    seed: int | None = None,
    on_example: Callable[[], None] = lambda: None,
) -> None:
    """Judges that many random plans.

    Raises:
        AssertionError: for the smallest failing plan that hypothesis found; the judge has it, too.
    """

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(plans(ranks))
    def run(plan: Plan) -> None:
        on_example()
        judge(plan)

    (run if seed is None else hypothesis.seed(seed)(run))()


# ---- by hand --------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """How many plans have begun.

    Attributes:
        wanted: random ones, unless one fails.
        smaller: tried after the first failure.
    """

    wanted: int
    random: int = 0
    smaller: int = 0

    def add(self, is_smaller_one: bool) -> None:
        self.smaller += is_smaller_one
        self.random += not is_smaller_one

    def __str__(self) -> str:
        begun = f"{self.random} of {self.wanted} begun"
        if self.smaller:
            begun += f"; one failed, and {self.smaller} more in search of a smaller one"
        return begun


def main(
    examples: Annotated[int, typer.Option(min=1, help="Random plans to run.")] = 200,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Processes; 1 runs in this one.")] = 2,
    seed: Annotated[
        int | None, typer.Option(help="Repeats an earlier search.", show_default="random, and printed")
    ] = None,
    max_hangs: Annotated[int, typer.Option(min=1, help="Give up on smaller plans after so many hangs.")] = 10,
) -> None:
    """Train random models in random ways; flag off, flag on and the plain model must agree.

    Exits with 1 at the first failure, after printing the smallest failing plan that was found.

    Example: python -m tests.support.stress --examples 5000 --ranks 2 --seed 1
    """
    seed = random.randrange(2**32) if seed is None else seed
    print(f"--examples {examples} --ranks {ranks} --seed {seed}", flush=True)
    judge, progress, counts = Judge(max_hangs), Progress("plans"), Counts(examples)

    def begin() -> None:
        progress.show(counts)
        counts.add(is_smaller_one=judge.failed is not None)

    with suppress(AssertionError):
        search(ranks, examples, judge, seed, begin)
    progress.show(counts, at_once=True)
    if judge.failed is not None:
        print("", *judge.failed, sep="\n")
        raise typer.Exit(1)
    print("All plans agree.")
