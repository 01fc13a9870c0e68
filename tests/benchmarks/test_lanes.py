"""`benchmarks/lanes.py`: both sides take turns, and its checks of sums and bytes pass."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_benchmark


def test_lanes_beside_the_library_s_order(tmp_path: Path) -> None:
    cases = ("--ranks", "2", "--device", "cpu", "--size", "1", "--shape", "tiny-l2", "--microbatches", "2")
    name, payload, printed = run_benchmark("lanes", tmp_path, *cases, "--rounds", "2", "--steps", "1")
    assert name == "lanes-tiny-l2-2"
    alone, step, alone_in_bf16, _ = payload["rows"]
    assert (alone["bytes"], alone_in_bf16["bytes"]) == (2**19, 2**18)
    assert len(step["ms"]) == len(step["lanes_ms"]) == 2
    assert step["least_ratio"] <= step["ratio"] <= step["greatest_ratio"]
    assert "gradient, 1 MiB" in printed and "tiny-l2, 2 layers, M = 2" in printed
