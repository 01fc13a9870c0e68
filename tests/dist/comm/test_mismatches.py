"""Two ranks that differ in one of 51 ways: both get an error that names them, or the result is right."""

from __future__ import annotations

import os

import pytest

from tests.support.faults.ranks.at_random import FAULTS, trial
from tests.support.faults.ranks.mismatches import MISMATCHES, USUAL, Mismatch
from tests.support.faults.ranks.processes import Ending, How, endings, judged
from tests.support.faults.ranks.program import Do, Operation, Setup, run
from tests.support.faults.ranks.reference import reference

LATE = ("state_dict, and the other is idle", "is stopped")
"""Cases that are run of those that wait for their time limit; the others are run by hand."""


def test_there_are_51() -> None:
    assert len(MISMATCHES) == 51


@pytest.mark.parametrize("name", [each.name for each in MISMATCHES.values() if not each.is_slow] + [*LATE])
def test_ranks_that_differ_are_named_or_right(name: str) -> None:
    mismatch = MISMATCHES[name]
    found, verdict = mismatch.run()
    assert verdict == "named", found


def test_ranks_that_do_the_same_are_right() -> None:
    found, verdict = Mismatch("none", Setup(), None, USUAL).run()
    assert verdict == "right" and all(each.how == "finished" and len(each.losses) == 6 for each in found)


def test_a_rank_that_is_late_within_the_time_limit_changes_nothing() -> None:
    late = (*USUAL[:4], Do("sleep", 0.3), Do("slow gather", 0.3), *USUAL[4:])
    both = (*USUAL[:4], Do("slow gather"), *USUAL[4:])
    found, verdict = Mismatch("late", Setup(), None, both, late).run()
    assert verdict == "right" and len(found[0].losses) == 6, found


@pytest.mark.parametrize("number", range(0, len(FAULTS), 5))
def test_random_faults_are_named_or_right(number: int) -> None:
    found, verdict = trial(5, number).run()
    assert verdict in ("right", "named"), found


# ---- the judge itself -----------------------------------------------------------------------------------


def test_wrong_numbers_are_silent() -> None:
    programs: list[list[Operation]] = [list(USUAL), list(USUAL)]
    right = reference(Setup(), programs)
    good = [Ending("finished", 1.0, "", tuple(losses)) for losses in right]
    bad = Ending("finished", 1.0, "", (*right[1][:3], right[1][3] + 0.01))
    assert judged(good, 1, right, [6, 6]) == "right"
    assert judged([good[0], bad], 1, right, [6, 6]) == "silent"
    few = Ending("finished", 1.0, "", tuple(right[1][:5]))
    assert judged([good[0], few], 1, right, [6, 6]) == "silent"
    assert judged(good, 1) == "silent", "ranks with other models may not finish"


@pytest.mark.parametrize(
    ("how", "verdict"), [("named", "named"), ("own error", "unnamed"), ("as told", "aborted")]
)
def test_a_rank_that_waits_has_to_be_told(how: How, verdict: str) -> None:
    killed = Ending("as told", 1.0)
    assert judged([Ending(how, 1.0), killed], 1, [[], []], [0, 0]) == verdict


def hangs(rank: int, losses: list[float]) -> None:
    run(rank, Setup(), [Do("sleep", 60.0 if rank else 0.0)], losses)


def dies(rank: int, losses: list[float]) -> None:
    if rank:
        os.abort()


def test_a_rank_that_does_not_end_hangs_and_one_that_dies_is_aborted() -> None:
    found = endings(2, hangs, limit=4.0)
    assert [each.how for each in found] == ["finished", "hung"] and judged(found, 1) == "hung"
    found = endings(2, dies)
    assert found[1].how == "aborted" and judged(found, 1) == "aborted"
