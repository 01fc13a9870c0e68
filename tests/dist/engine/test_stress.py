"""Random models, trained in random ways: flag off, flag on and the unsharded model agree."""

from __future__ import annotations

import pytest

from tests.support.programs import run_program
from tests.support.random_programs import difference, drawn
from tests.support.stress.search import Judge, search


@pytest.mark.parametrize(("ranks", "examples"), [(1, 10), (2, 14), (3, 5), (4, 6)])
def test_flag_off_flag_on_and_plain_agree(ranks: int, examples: int) -> None:
    search(ranks, examples, Judge())


def test_a_search_by_hand_says_how_far_it_is_without_a_terminal() -> None:
    done = run_program("-m", "tests.support.stress", "--examples", "2", "--ranks", "1", "--seed", "1")
    begin, last, verdict = done.stdout.splitlines()
    assert begin == "--examples 2 --ranks 1 --seed 1"
    assert last.startswith("plans: 2 of 2 begun  (")
    assert verdict == "All plans agree."


# ---- slots and units that idle, penalties and freezing ---------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_is_that_of_plain_pytorch(seed: int) -> None:
    program = drawn(seed)
    problem = difference(program)
    assert not problem, f"{program}\n{problem}"
