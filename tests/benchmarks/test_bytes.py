"""The bytes benchmark's rows with FP8 weights equal their formulas; those of bf16 are in `test_bytes.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def benchmark(benchmarks: Callable[[str], Any]) -> Any:
    return benchmarks("bytes")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (4, 3)])
def test_fp8_rows_equal_their_formulas(benchmark: Any, ranks: int, steps: int) -> None:
    cases = [(case, steps) for case in benchmark.CASES if case.fp8 and case.runs_here]
    per_rank = benchmark.results_of_ranks(ranks, benchmark.measure_all, cases)
    for row in per_rank[0]:
        assert row.disagreements() == [], row.label
    ours = [row.measured for row in per_rank[0] if row.case.engine == "FlatFSDP"]
    assert len(ours) == 2
    assert all(traffic.copy == traffic.concat == traffic.accumulate == traffic.other == 0 for traffic in ours)


def test_what_does_not_run_here_is_marked(benchmark: Any) -> None:
    case = benchmark.Case("fairscale", zero=3)
    (row,) = benchmark.measure_all(0, 4, [(case, 1)])
    assert row.measured is None and row.label.endswith("(formula)") and row.disagreements() == []
    # A cast at each of two gathers, a concat, a widening, divisions before and after a sum into zeros.
    assert row.shown.local == pytest.approx(2 * 6 / 4 + 4 + 6 + 8 + 8 / 4 + 4 / 4)
