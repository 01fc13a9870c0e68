"""A job of two hosts goes on with one of them: two torchrun agents on this machine stand for the hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.hosts import ON_CPUS, lines_of, require_resumed, run_with_a_loss
from tests.support.programs import run_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_llama.py"
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "kv_heads": 1, "vocab": 256, "seq": 32}
STEPS, SAVE_EVERY = 40, 5
OPTIONS = (
    *("--lanes", "4", "--lane-block", "2", "--dp-shard", "2", "--dp-replicate", "-1", "--microbatches", "8"),
    *("--batch", "1", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--precision", "fp32"),
    *("--data", __file__, "--json"),
)


def program(folder: Path) -> list[str]:
    folder.mkdir()
    config = folder / "sizes.json"
    config.write_text(json.dumps(SIZES))
    return [str(EXAMPLE), *OPTIONS, "--config", str(config), "--out", str(folder)]


def figures(step: dict[str, Any]) -> tuple[float, float]:
    return step["loss"], step["grad_norm"]


def test_a_job_that_loses_a_host_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_program(*program(tmp_path / "whole"), ranks=4, **ON_CPUS)
    assert whole.returncode == 0, whole.stderr
    expected = {step["step"]: figures(step) for step in lines_of(whole.stdout)}
    assert list(expected) == list(range(1, STEPS + 1))

    steps, errors = run_with_a_loss(program(tmp_path / "hosts"), step=12, ranks=2)
    assert "has ended, or left a collective" in errors
    # Steps that were not saved are repeated by the two ranks that are left.
    require_resumed([step["step"] for step in steps], STEPS, SAVE_EVERY)
    assert [step for step in steps if figures(step) != expected[step["step"]]] == []
