"""Two ranks that differ in one of 51 ways: both get an error that names them, or the result is right."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.support.faults.ranks.at_random import FAULTS, trial
from tests.support.faults.ranks.mismatches import MISMATCHES, USUAL, Mismatch
from tests.support.faults.ranks.processes import Ending, How, Started, judged
from tests.support.faults.ranks.program import Do, Operation, Setup, run
from tests.support.faults.ranks.reference import reference
from tests.support.faults.ranks.trials import Result

LATE = ("state_dict, and the other is idle", "is stopped")
"""Cases that are run of those that wait for their time limit; the others are run by hand."""


def test_there_are_51() -> None:
    assert len(MISMATCHES) == 51


AHEAD = 4
"""Cases that run already while one is waited for: ranks that wait take no time of the processor."""

Case = tuple[str, str | int]
"""The name of the parameter, and its value: a mismatch, or a random fault."""


@pytest.fixture(scope="module")
def result_of(request: pytest.FixtureRequest) -> Callable[[Case], Result]:
    """The results of cases; those that come next are begun."""
    cases = [
        case
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
        for case in item.callspec.params.items()
        if case[0] in ("name", "number")
    ]
    begun: dict[Case, Callable[[], Result]] = {}

    def result(case: Case) -> Result:
        at = cases.index(case)
        for key, value in cases[at : at + 1 + AHEAD]:
            if (key, value) not in begun:
                begun[key, value] = (MISMATCHES[value] if key == "name" else trial(5, value)).begun()
        return begun[case]()

    return result


@pytest.mark.parametrize("name", [each.name for each in MISMATCHES.values() if not each.is_slow] + [*LATE])
def test_ranks_that_differ_are_named_or_right(name: str, result_of: Callable[[Case], Result]) -> None:
    found, verdict = result_of(("name", name))
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
def test_random_faults_are_named_or_right(number: int, result_of: Callable[[Case], Result]) -> None:
    found, verdict = result_of(("number", number))
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
    found = Started(2, hangs).endings(limit=4.0)
    assert [each.how for each in found] == ["finished", "hung"] and judged(found, 1) == "hung"
    found = Started(2, dies).endings()
    assert found[1].how == "aborted" and judged(found, 1) == "aborted"
