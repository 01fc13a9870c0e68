"""The cases of the ecosystem's tests: which values meet."""

from __future__ import annotations

import itertools

import pytest

from tests.support.ecosystem.covering import covering


@pytest.mark.parametrize("ways", ["ab", "abc"])
def test_all_pairs_of_a_first_and_all_triples_of_two(ways: str) -> None:
    cases = list(covering(["x", "y", "z"], ways, [1, 2], [True, False]))
    assert len(cases) == len(set(cases)) == 3 * 2 * len(ways)
    for name in "xyz":
        rows = [row for first, *row in cases if first == name]
        for a, b in itertools.combinations(range(3), 2):
            values = ({row[a] for row in rows}, {row[b] for row in rows})
            assert {(row[a], row[b]) for row in rows} == set(itertools.product(*values))
            assert all(len(each) > 1 for each in values)
    triples = {tuple(row) for first, *row in cases if first != "z"}
    assert triples == set(itertools.product(ways, [1, 2], [True, False]))


def test_too_many_values_to_meet() -> None:
    with pytest.raises(ValueError, match="3 values do not meet all of 2 and 5"):
        list(covering(["x"], "ab", range(5), "abc"))
