"""Random models, trained in random ways: flag off, flag on and the unsharded model agree."""

from __future__ import annotations

import pytest

from tests.support.stress.search import Judge, search


@pytest.mark.parametrize(("ranks", "examples"), [(1, 10), (2, 20), (3, 8), (4, 8)])
def test_flag_off_flag_on_and_plain_agree(ranks: int, examples: int) -> None:
    search(ranks, examples, Judge())
