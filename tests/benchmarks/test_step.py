"""The step benchmark measures every engine, also under torchrun, and its engines train alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_benchmark

WARMUP, STEPS = 1, 2


def measured(out: Path, *options: str, torchrun: bool = False) -> Any:
    """The results on two CPU ranks, which may already exist, with two microbatches."""
    amount = ("--microbatches", "2", "--warmup", str(WARMUP), "--steps", str(STEPS))
    own = () if torchrun else ("--ranks", "2")
    return run_benchmark("step", out, *own, *amount, *options, ranks=2 if torchrun else 0)[1]


def test_engines_are_measured_and_train_alike(tmp_path: Path) -> None:
    payload = measured(tmp_path, "--shape", "tiny")
    rows = {row["name"]: row for row in payload["rows"]}
    assert list(rows) == ["flat-off", "flat-on", "fsdp2", "fairscale"]
    assert "needs CUDA" in rows["fairscale"]["skipped"] or "not installed" in rows["fairscale"]["skipped"]

    losses = {}
    for name in ("flat-off", "flat-on", "fsdp2"):
        assert rows[name]["ms"] > 0 and rows[name]["time_vs_fsdp2"] > 0
        # The first engine is measured again at the end.
        assert len(rows[name]["runs"]) == (2 if name == "flat-off" else 1)
        losses[name] = rows[name]["runs"][0]["losses"]
        assert len(losses[name]) == WARMUP + STEPS and all(map(math.isfinite, losses[name]))
    assert losses["flat-on"] == losses["flat-off"] == rows["flat-off"]["runs"][1]["losses"]
    assert payload["same_losses"] == {"eager": True}
    assert losses["fsdp2"] == pytest.approx(losses["flat-on"], rel=1e-4)
    assert losses["fsdp2"][-1] < losses["fsdp2"][0]


FP8 = ("flat-fp8-delayed", "flat-fp8-current")


def engines(*names: str) -> list[str]:
    return [option for name in names for option in ("--engines", name)]


def test_own_layers_train_like_the_plain_model(tmp_path: Path) -> None:
    names = ("flat-on", "flat-bf16-fused", *FP8)
    payload = measured(tmp_path, "--shape", "tiny", "--breakdown", *engines(*names))
    losses = {row["name"]: row["runs"][0]["losses"] for row in payload["rows"]}
    assert tuple(losses) == names
    assert losses["flat-bf16-fused"] == pytest.approx(losses["flat-on"], rel=1e-4)
    for name in FP8:
        assert losses[name] == pytest.approx(losses["flat-on"], rel=1e-3)
        assert losses[name] != losses["flat-bf16-fused"], "nothing was in FP8"
        assert losses[name][-1] < losses[name][0]
    runs = {row["name"]: row["runs"][0] for row in payload["rows"]}
    # One byte per weight between steps instead of two.
    assert runs["flat-fp8-current"]["reported_gib"] < runs["flat-bf16-fused"]["reported_gib"]
    always = [row["total"] for row in runs["flat-on"]["buffers"] if row["lives"] == "always"]
    assert runs["flat-on"]["reported_gib"] == sum(always) / 2**30
    # Kernels exist on GPUs only.
    assert all(run["breakdown"] is None for run in runs.values())


def test_replayed_variants_say_what_was_not_replayed(tmp_path: Path) -> None:
    """On CPUs everything is eager: the same losses, and a marked row."""
    names = ("fsdp2", "flat-bf16-fused")
    payload = measured(tmp_path, "--shape", "tiny", "--replay", *engines(*names))
    rows = {row["name"]: row for row in payload["rows"]}
    assert tuple(rows) == (*names, "flat-bf16-fused-replay")
    eager, replayed = rows["flat-bf16-fused"], rows["flat-bf16-fused-replay"]
    assert replayed["runs"][0]["losses"] == eager["runs"][0]["losses"]
    assert eager["not_replayed"] is None and replayed["not_replayed"] == 2 * STEPS
    # These are measured on GPUs only.
    assert replayed["host_ms"] is None and replayed["peak_reserved_gib"] == 0
    assert rows["fsdp2"]["not_replayed"] is None


def test_own_layers_without_a_vocabulary(tmp_path: Path) -> None:
    payload = measured(tmp_path, "--shape", "tiny-l2", "--keep", *engines("flat-on", *FP8), torchrun=True)
    plain, *fp8 = (row["runs"][0]["losses"] for row in payload["rows"])
    assert all(losses == pytest.approx(plain, rel=1e-3) for losses in fp8)


def test_torchao_trains_like_the_own_layers(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    names = engines("flat-fp8-current", "fsdp2-float8")
    payload = measured(tmp_path, "--shape", "tiny-l2", "--keep", *names)
    ours, theirs = payload["rows"]
    assert theirs["name"] == "fsdp2-float8-compile" and theirs["time_vs_fsdp2_float8"] == 1.0
    assert ours["time_vs_fsdp2_float8"] == ours["ms"] / theirs["ms"]
    assert theirs["runs"][0]["losses"] == pytest.approx(ours["runs"][0]["losses"], rel=1e-3)
