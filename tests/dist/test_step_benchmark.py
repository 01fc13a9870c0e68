"""The step benchmark runs under torchrun, measures every engine, and its engines train alike."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WARMUP, STEPS = 1, 2


def run_benchmark(out: Path, *options: str) -> dict[str, Any]:
    """What `benchmarks/step.py` writes, on two CPU ranks with two microbatches."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    amount = ["--microbatches", "2", "--warmup", str(WARMUP), "--steps", str(STEPS)]
    command = [*torchrun, "benchmarks/step.py", "--device", "cpu", "--out", str(out), *amount, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = out.glob("*.json")
    assert written.with_suffix(".png").stat().st_size > 0
    return json.loads(written.read_text())


@pytest.mark.parametrize(
    ("shape", "policy"), [("tiny", "--reshard"), ("tiny-l2", "--keep")], ids=["tokens", "activations"]
)
def test_engines_are_measured_and_train_alike(tmp_path: Path, shape: str, policy: str) -> None:
    payload = run_benchmark(tmp_path, "--shape", shape, policy)
    rows = {row["name"]: row for row in payload["rows"]}
    assert list(rows) == ["flat-off", "flat-on", "fsdp2", "fairscale"]
    assert "needs CUDA" in rows["fairscale"]["skipped"] or "not installed" in rows["fairscale"]["skipped"]

    losses = {}
    for name in ("flat-off", "flat-on", "fsdp2"):
        assert rows[name]["ms"] > 0 and rows[name]["time_vs_fsdp2"] > 0
        # The first engine is measured once more at the end.
        assert len(rows[name]["runs"]) == (2 if name == "flat-off" else 1)
        losses[name] = rows[name]["runs"][0]["losses"]
        assert len(losses[name]) == WARMUP + STEPS and all(map(math.isfinite, losses[name]))
    assert losses["flat-on"] == losses["flat-off"] == rows["flat-off"]["runs"][1]["losses"]
    assert payload["flag_changes_nothing"] == {"eager": True}
    assert losses["fsdp2"] == pytest.approx(losses["flat-on"], rel=1e-4)
    assert losses["fsdp2"][-1] < losses["fsdp2"][0]
