"""The benchmark of checkpoints measures every way to save and to load, beside plain DCP."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.support.programs import run_benchmark


def test_rows(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "made" / "here"
    options = ("--ranks", "2", "--preset", "tiny", "--rounds", "2", "--json", "--folder", folder)
    name, payload, _ = run_benchmark("checkpoint", out, *options)
    assert name == "checkpoint-tiny-2-cpu"
    # FP32 parameters and two moments, and metadata.
    assert payload["bytes"] > 12 * payload["parameters"]
    rows = {(row["action"], row["name"]): row for row in payload["rows"]}
    ours, plain = "FlatFSDP", "plain DCP"
    saves = [ours, "FlatFSDP, no digests", plain, "FlatFSDP, in the background"]
    loads = [ours, "FlatFSDP, unverified", plain]
    assert list(rows) == [("save", name) for name in saves] + [("load", name) for name in loads]
    for (action, _), row in rows.items():
        seconds = row["seconds_of_each_round"]
        assert len(seconds) == 2 and min(seconds) > 0
        assert row["seconds"] == statistics.median(seconds)
        of_plain = rows[action, plain]["seconds_of_each_round"]
        assert row["ratio"] == pytest.approx(
            statistics.median(a / b for a, b in zip(seconds, of_plain, strict=True))
        )
    # The checkpoints are removed.
    assert list(folder.iterdir()) == []
