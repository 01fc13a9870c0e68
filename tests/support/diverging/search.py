"""Diverging ranks: random models, in whose training one rank does something else at one random point.

See `plans.py` for what is varied, `training.py` for what is right.  Each plan ends as

    right     all losses, reduced gradients and parameters are those of plain data parallel
    named     every rank raises, and one of each group that shares parameters says what ranks did
    waited    some rank waits for the others until its time limit, or ends with the backend's own error
    SILENT    anything else: wrong numbers, be they followed by an error or not; an error that names
              nothing; an error where all has to be right

CI runs some of them (`dist/comm/test_diverging.py`).  For more, and to find the smallest plan that is silent:

    python -m tests.support.diverging --examples 300 --ranks 2 --seed 1
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Literal, NamedTuple, get_args

import typer

from tests.support.diverging import plans as diverging_plans
from tests.support.diverging.plans import Plan, random_plan
from tests.support.diverging.training import Report, check_on_rank
from tests.support.ranks import RankFailure, run_ranks, stop_pools
from tests.support.stress import plans as stress_plans

Verdict = Literal["right", "named", "waited", "SILENT"]

WORDS = "ranks do not do the same"
"""What every message has that names a divergence."""

PATIENCE = 5.0
"""Seconds that a collective waits; the training itself takes less than one."""

BACKEND_ERRORS = re.compile("gloo|connection closed|timed out|connection reset|broken pipe", re.IGNORECASE)


STALE = "changed between this forward and its backward"
"""The one rank's own error: it has summoned parameters, which counts as a write, where a backward follows."""


def has_to_be_right(plan: Plan) -> bool:
    """Whether all ranks call the same units in one order, whatever the one rank does."""
    what, blocks = plan.divergence.what, plan.divergence.blocks
    if what == "a block returns its input":
        return not any(plan.blocks[block].holds_units for block in blocks)
    return what in ("skips the optimizer", "swaps microbatches")


class Outcome(NamedTuple):
    verdict: Verdict
    why: str


def judge(plan: Plan) -> Outcome:
    """Runs the plan on a pool of ranks, which lives on if all went right."""
    try:
        reports = run_ranks(plan.ranks, check_on_rank, plan, timeout=8 * PATIENCE, patience=PATIENCE)
    except RankFailure as failure:
        # A rank that has left says nothing about its numbers, nor do the others to us.
        stop_pools()
        lost = all(e in (None, *LOST) for e in failure.errors)
        return Outcome("waited" if lost else "SILENT", str(failure))
    outcome = verdict_on(reports, plan.shard_size)
    if outcome.verdict == "right" and plan.divergence.what == "one more reduction":
        outcome = Outcome("SILENT", "ranks have reduced different numbers of times, and none noticed")
    if outcome.verdict == "named" and has_to_be_right(plan):
        outcome = Outcome("SILENT", f"an error where all has to be right\n{outcome.why}")
    if outcome.verdict != "right":
        stop_pools()
    return outcome


LOST = ("no answer in time (stuck in a collective?)", "the process died")


def verdict_on(reports: list[Report], shard_size: int) -> Outcome:
    why = "\n".join(
        f"rank {rank}: {problem}"
        for rank, report in enumerate(reports)
        for problem in (report.wrong, report.error)
        if problem
    )
    if any(report.wrong for report in reports):
        return Outcome("SILENT", why)
    if not any(report.error for report in reports):
        return Outcome("right", "")
    named = [WORDS in report.error for report in reports]
    rows = [any(named[first : first + shard_size]) for first in range(0, len(named), shard_size)]
    if all(report.error for report in reports) and all(rows):
        return Outcome("named", why)
    errors = [report.error for report in reports if report.error and WORDS not in report.error]
    is_loud = all(BACKEND_ERRORS.search(error) or STALE in error for error in errors)
    return Outcome("waited" if is_loud else "SILENT", why)


# ---- many plans -----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many plans ended how.

    Attributes:
        by_kind: by verdict and by what the one rank did.
        silent: the plans that are silent, and why.
    """

    by_kind: Counter[tuple[Verdict, str]] = field(default_factory=Counter)
    silent: list[tuple[Plan, str]] = field(default_factory=list)

    def add(self, plan: Plan, outcome: Outcome) -> None:
        self.by_kind[outcome.verdict, plan.divergence.what] += 1
        if outcome.verdict == "SILENT":
            self.silent.append((plan, outcome.why))
            print(f'--plan "{plan}"', outcome.why, sep="\n", flush=True)

    def count(self, verdict: Verdict) -> int:
        return sum(count for (each, _), count in self.by_kind.items() if each == verdict)

    def __str__(self) -> str:
        counts = " / ".join(f"{verdict} {self.count(verdict)}" for verdict in get_args(Verdict))
        return f"tried {self.by_kind.total()} / {counts}"

    def table(self) -> str:
        """One line for each thing that one rank can do."""
        kinds = sorted({what for _, what in self.by_kind})
        head = "".join(f"{verdict:>8}" for verdict in get_args(Verdict))
        lines = [
            f"{what:28}" + "".join(f"{self.by_kind[verdict, what]:8}" for verdict in get_args(Verdict))
            for what in kinds
        ]
        return "\n".join([f"{'':28}{head}", *lines])


def judged(tally: Tally, ranks: int, examples: int, seed: int) -> Iterator[Plan]:
    """Random plans, `examples` of them, each when it is in the tally."""
    chance = random.Random(seed)
    for _ in range(examples):
        plan = random_plan(ranks, chance)
        tally.add(plan, judge(plan))
        yield plan


def smallest(found: list[tuple[Plan, str]], seconds: float) -> tuple[Plan, str]:
    """The shortest of the silent plans, with as many defaults put back as leave it silent."""
    plan, why = min(found, key=lambda each: len(repr(each[0])))
    deadline = time.monotonic() + seconds
    for each in fields(plan):
        if each.default is MISSING or getattr(plan, each.name) == each.default:
            continue
        if time.monotonic() > deadline:
            break
        simpler = replace(plan, **{each.name: each.default})
        if _is_possible(simpler):
            outcome = judge(simpler)
            if outcome.verdict == "SILENT":
                plan, why = simpler, outcome.why
    return plan, why


def _is_possible(plan: Plan) -> bool:
    point = plan.divergence
    exists = point.step < plan.steps and point.microbatch < plan.microbatches
    return exists and {*point.blocks} <= {*plan.order} and (plan.head != "tied" or plan.start == "embedding")


def plan_from(line: str) -> Plan:
    """The plan that prints as `line`."""
    return eval(line, {**vars(stress_plans), **vars(diverging_plans)})


# ---- by hand --------------------------------------------------------------------------------------------


def main(
    examples: Annotated[int, typer.Option(min=1, help="Random plans to run.")] = 300,
    ranks: Annotated[int, typer.Option(min=2, max=8, help="Processes.")] = 2,
    seed: Annotated[
        int | None, typer.Option(help="Repeats an earlier run.", show_default="random, and printed")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Run this one instead: a line that was printed.")] = None,
    shrink: Annotated[float, typer.Option(min=0.0, help="Seconds to look for a smaller silent plan.")] = 60.0,
) -> None:
    """Train random models while one rank does something else: it is right, or it is named, never silent.

    Ranks that wait for each other are counted, and allowed.  Exits with 1 if a plan is silent.

    Examples:

    python -m tests.support.diverging --examples 300 --ranks 2 --seed 1

    python -m tests.support.diverging --plan "Plan(2, (Block(), Block()), Divergence('evaluation'))"
    """
    if plan is not None:
        outcome = judge(plan_from(plan))
        print(outcome.verdict, outcome.why, sep="\n")
        raise typer.Exit(int(outcome.verdict == "SILENT"))
    seed = random.randrange(2**32) if seed is None else seed
    print(f"--examples {examples} --ranks {ranks} --seed {seed}", flush=True)
    tally, began = Tally(), time.monotonic()
    for number, _ in enumerate(judged(tally, ranks, examples, seed), 1):
        if number % 10 == 0:
            print(f"{tally}  ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"\n{tally.table()}\n\n{tally}  ({time.monotonic() - began:.0f} s)", flush=True)
    if tally.silent:
        late = sum("Traceback" in why for _, why in tally.silent)
        print(f"{late} of {len(tally.silent)} silent ones end with an error, after numbers that are wrong")
        found, why = smallest(tally.silent, shrink)
        print(f"\nThe smallest silent plan:\n--plan {str(found)!r}\n\n{why}")
        raise typer.Exit(1)
