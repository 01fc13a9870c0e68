"""The products benchmark runs on a CPU, and reports what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_benchmark, run_program


def test_everything_is_measured_and_written(tmp_path: Path) -> None:
    name, payload, _ = run_benchmark("products", tmp_path, "--rounds", "2", "--json")
    rows = {(row["direction"], row["path"]): row for row in payload["rows"]}
    assert name == "products" and len(rows) == len(payload["rows"]) == 4
    for (direction, _), row in rows.items():
        flops = 2 * row["tokens"] * row["columns"] * row["inner"]
        assert row["tflops"] == pytest.approx(flops / row["us"] / 1e6)
        assert row["speed"] == pytest.approx(rows[direction, "PyTorch"]["us"] / row["us"])


def test_a_sweep_needs_cublas_lt(tmp_path: Path) -> None:
    done = run_program("benchmarks/products.py", "--device", "cpu", "--sweep", "--out", str(tmp_path))
    assert done.returncode == 2 and "nvmath-python" in done.stderr
