"""`benchmarks/grad_sync.py`: both ways take turns on one model, and its check of bytes passes."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_benchmark


def test_every_beside_last(tmp_path: Path) -> None:
    cases = ("--ranks", "2", "--device", "cpu", "--shape", "tiny-l2", "--microbatches", "3", "--rounds", "2")
    name, payload, printed = run_benchmark("grad_sync", tmp_path, *cases)
    assert name == "grad-sync-tiny-l2-m3-2" and "The whole gradient" in printed
    for row, nbytes in zip(payload["rows"], (4, 2), strict=True):
        assert row["every_bytes"] == 3 * row["last_bytes"] > 0
        assert row["last_bytes"] * 2 == nbytes * row["gradient_gib"] * 2**30 / 4
        assert len(row["last_ms"]) == len(row["every_ms"]) == 2
