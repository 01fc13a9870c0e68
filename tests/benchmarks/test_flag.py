"""The flag's benchmark compares the same training with the flag off and on, and what builds on it."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_benchmark, run_program


def test_only_fusion_changes_losses(tmp_path: Path) -> None:
    sizes = ("--tokens", "16", "--microbatches", "3", "--steps", "1", "--rounds", "2")
    name, payload, printed = run_benchmark("flag", tmp_path, "--ranks", "2", "--precision", "fp8", *sizes)
    assert "off and on are equal bit for bit" in printed
    assert (
        name == "flag-2"
        and payload["ranks"] == 2
        and payload["flag_changes_no_bit"]
        and not payload["failed"]
    )
    rows = {row["way"]: row for row in payload["rows"]}
    assert list(rows) == ["off", "on", "fused", "replayed"]
    assert {row["dtype"] for row in rows.values()} == {"fp8"}
    assert [row["losses_as_of"] for row in rows.values()] == ["off", "off", "fused", "fused"]
    for row in rows.values():
        assert len(row["ms"]) == 2 and row["times_as_fast"] == rows["off"]["median_ms"] / row["median_ms"]
        losses = row["compared_losses"]
        assert losses[0] != losses[1], "both ranks have the same data"
        assert all(each[-1] < each[0] for each in losses)
    # On CPUs everything is eager, and the row says so.
    assert [row["eager_microbatches"] for row in rows.values()] == [0, 0, 0, 6]


def test_tokens_that_fp8_cannot_take_are_refused(tmp_path: Path) -> None:
    done = run_program("benchmarks/flag.py", "--device", "cpu", "--tokens", "40", "--out", tmp_path)
    assert done.returncode == 2 and "--tokens 40 is no multiple of 16" in done.stderr
