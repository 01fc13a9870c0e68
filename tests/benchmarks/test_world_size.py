"""`benchmarks/world_size.py`: its list covers what it says, and two ranks have the bits of one."""

from __future__ import annotations

import importlib
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.programs import run_benchmark

pytest.importorskip("transformers")


def test_runs_have_the_bits_of_one_rank_and_of_the_plain_program(tmp_path: Path) -> None:
    sizes = ("--steps", "2", "--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16")
    which = ("--model", "gpt", "--precision", "fp32", "--precision", "fp8-delayed", "--most-ranks", "2")
    name, payload, printed = run_benchmark("world_size", tmp_path, *which, *sizes)
    rows = payload["rows"]
    assert name == "world-size-cpu" and len(rows) >= 8
    assert all(not row["differences"] for row in rows) and "yes" in printed
    assert {(row["lanes"], row["ranks"]) for row in payload["plain"]} == {(12, 1), (12, 2), (8, 1), (8, 2)}
    assert "4 runs, of which 0 have other weights than the plain program" in printed
    assert {row["sharded"] for row in rows} == {"dp", "zero2", "zero3"}
    for _, alike in groupby(rows, key=lambda row: (row["precision"], row["lanes"], row["block"])):
        of_group = list(alike)
        assert of_group[0]["ranks"] == 1 < of_group[-1]["ranks"]
        assert len({(row["final_loss_hex"], row["grad_norm_hex"]) for row in of_group}) == 1


def test_every_pair_of_settings_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("world_size")
    runs = module.covering(tuple(module.Model), module.PRECISIONS)
    pairs = set().union(*(run.pairs for run in runs))
    for run in module.possible(tuple(module.Model), module.PRECISIONS, 8):
        assert run.pairs <= pairs
    assert all(any(one.group == run.group and one.ranks == 1 for one in runs) for run in runs)
