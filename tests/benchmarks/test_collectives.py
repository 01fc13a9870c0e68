"""The collectives benchmark measures every operation at every size, and refuses wrong results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp.comm.launch import Rank
from tests.support.assertions import assert_raises
from tests.support.programs import run_benchmark

KIB, MIB = 2**10, 2**20
OPERATIONS = ["all-reduce", "reduce-scatter", "all-gather"]
MEASURING = ("--repeats", "3", "--json")


def check_rows(payload: dict[str, Any], sizes: list[int]) -> None:
    """All operations are there at all sizes, with figures that follow the docstring's formulas."""
    ranks, limit = payload["ranks"], payload["limit"]["gb_s"]
    found = [(row["operation"], row["bytes"]) for row in payload["rows"]]
    assert found == [(operation, size) for size in sizes for operation in OPERATIONS]
    assert math.isfinite(limit) and limit > 0
    for row in payload["rows"]:
        assert len(row["ms_of_each_batch"]) == payload["repeats"] == 3
        assert all(math.isfinite(ms) and ms > 0 for ms in row["ms_of_each_batch"])
        assert row["ms"] == statistics.median(row["ms_of_each_batch"])
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / (row["ms"] / 1e3) / 1e9)
        passes = 2 if row["operation"] == "all-reduce" else 1
        assert row["bus_gb_s"] / row["algorithm_gb_s"] == pytest.approx(passes * (ranks - 1) / ranks)
        assert row["share_of_limit"] == pytest.approx(row["bus_gb_s"] / limit)


def test_sweep_on_ranks_of_its_own(tmp_path: Path) -> None:
    options = ("--ranks", "3", "--from", "48KiB", "--to", "1MiB", *MEASURING)
    name, payload, _ = run_benchmark("collectives", tmp_path, *options)
    assert name == "collectives-gloo-3"
    assert (payload["backend"], payload["ranks"], payload["dtype"]) == ("gloo", 3, "float32")
    assert payload["environment"]["torch"] == torch.__version__
    assert "memory copy" in payload["limit"]["source"]
    check_rows(payload, [48 * KIB, 192 * KIB, 768 * KIB])


def test_one_size_under_torchrun(tmp_path: Path) -> None:
    options = ("--size", "1MiB", "--dtype", "bfloat16", *MEASURING)
    name, payload, _ = run_benchmark("collectives", tmp_path, *options, ranks=2)
    assert name == "collectives-gloo-2-bfloat16-1MiB"
    assert (payload["ranks"], payload["dtype"]) == (2, "bfloat16")
    check_rows(payload, [MIB])


@pytest.fixture
def collectives(benchmarks: Callable[[str], Any]) -> Any:
    return benchmarks("collectives")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_results_are_refused(benchmarks: Callable[[str], Any], name: str, dtype: torch.dtype) -> None:
    measured = benchmarks("lib.collectives_measured")
    operation, rank, numel = measured.Operation(name), Rank(1, 2, torch.device("cpu")), 4096
    length = numel // 2 if name == "all-gather" else numel
    ours, theirs = (measured.payload(index, length, dtype, rank.device) for index in (1, 0))
    right = {
        "all-reduce": (ours + theirs) / 2,
        "reduce-scatter": ((ours + theirs) / 2)[numel // 2 :],
        "all-gather": torch.cat([theirs, ours]),
    }[name]
    measured.check(right, operation, numel, rank)

    one_off, broken = right.clone(), right.clone()
    one_off[-1] += 1
    broken[7] = torch.nan
    for wrong in (one_off, broken, right.roll(1), torch.zeros_like(right)):
        words = rf"{name} of \S+ KiB of {dtype} gave a wrong result on rank 1"
        assert_raises(RuntimeError, words, measured.check, wrong, operation, numel, rank)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64MiB", 64 * MIB), ("3 KiB", 3 * KIB), ("1GiB", 2**30), ("7", 7), ("8B", 8)]
)
def test_sizes_are_read(collectives: Any, text: str, nbytes: int) -> None:
    assert collectives.parse_size(text) == nbytes


def test_what_makes_no_sense_is_refused(collectives: Any) -> None:
    refused = partial(assert_raises, collectives.typer.BadParameter)
    for text in ("", "64MB", "0", "-1KiB", "1.5MiB", "MiB"):
        refused("no size", collectives.parse_size, text)
    refused("pass either", collectives.sizes_to_measure, MIB, MIB, None, "cpu")
    refused("above --to", collectives.sizes_to_measure, None, 4 * MIB, MIB, "cpu")
