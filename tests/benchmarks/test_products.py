"""The products benchmark runs on a CPU, and reports what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import run_program

SCRIPT = "benchmarks/products.py"


def test_everything_is_measured_and_written(tmp_path: Path) -> None:
    done = run_program(SCRIPT, "--device", "cpu", "--rounds", "2", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    payload = json.loads((tmp_path / "products.json").read_text())
    assert json.loads(done.stdout) == payload and (tmp_path / "products.png").stat().st_size > 0
    rows = {(row["direction"], row["path"]): row for row in payload["rows"]}
    assert len(rows) == len(payload["rows"]) == 4
    for (direction, _), row in rows.items():
        flops = 2 * row["tokens"] * row["columns"] * row["inner"]
        assert row["tflops"] == pytest.approx(flops / row["us"] / 1e6)
        assert row["speed"] == pytest.approx(rows[direction, "PyTorch"]["us"] / row["us"])


def test_a_sweep_needs_cublas_lt(tmp_path: Path) -> None:
    done = run_program(SCRIPT, "--device", "cpu", "--sweep", "--out", str(tmp_path))
    assert done.returncode == 2 and "nvmath-python" in done.stderr
