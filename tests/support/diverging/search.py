"""Diverging ranks: random models, in whose training one rank does something else at one random point.

See `plans.py` for what is varied, `training.py` for what is right.  Each plan ends as

    right     all losses, reduced gradients and parameters are those of plain data parallel
    named     every rank raises, and one of each group that shares parameters says what ranks did
    waited    some rank waits for the others until its time limit, or ends with the backend's own error
    SILENT    anything else: wrong numbers, be they followed by an error or not; an error that names
              nothing; an error where all has to be right

CI runs some of them (`dist/comm/test_diverging.py`).  For more:

    python -m tests.support.diverging --examples 300 --ranks 2 --seed 1
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import typer

from tests.support.diverging import plans as diverging_plans
from tests.support.diverging.plans import Plan, random_plan
from tests.support.diverging.training import Report, check_on_rank
from tests.support.progress import Progress
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


def judged(ranks: int, examples: int, seed: int) -> Iterator[tuple[Plan, Outcome]]:
    """Random plans, `examples` of them, and how each ends."""
    chance = random.Random(seed)
    for _ in range(examples):
        plan = random_plan(ranks, chance)
        yield plan, judge(plan)


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
) -> None:
    """Train random models while one rank does something else: it is right, or it is named, never silent.

    Ranks that wait for each other are counted, and allowed.  Exits with 1 if a plan is silent.

    Examples:

    python -m tests.support.diverging --examples 300 --ranks 2 --seed 1

    python -m tests.support.diverging --plan "Plan(2, (Block(), Block()), Divergence('evaluates'))"
    """
    seed = random.randrange(2**32) if seed is None else seed
    runs = judged(ranks, examples, seed)
    if plan is not None:
        runs = iter([(one := plan_from(plan), judge(one))])
    else:
        print(f"--examples {examples} --ranks {ranks} --seed {seed}", flush=True)
    counts, progress = Counter[str](), Progress("plans")
    for found, outcome in runs:
        counts[outcome.verdict] += 1
        if outcome.verdict == "SILENT":
            print(f'--plan "{found}"', outcome.why, sep="\n", flush=True)
        progress.show(dict(counts))
    progress.show(dict(counts), at_once=True)
    raise typer.Exit(int(counts["SILENT"] > 0))
