"""The benchmarks of layers run on a CPU with small sizes, and write consistent results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import run_benchmark


def test_layer(tmp_path: Path) -> None:
    modes = ("eager", "flat-bf16-fused", "flat-delayed-cached-fused", "flat-current-cached-fused")
    shape = ("--hidden", "64", "--ffn", "128", "--heads", "4", "--seq", "16", "--batch", "2")
    options = [option for mode in modes for option in ("--modes", mode)]
    sizes = (*shape, "--steps", "2", "--rounds", "1")
    name, payload, _ = run_benchmark("layer", tmp_path, *options, *sizes)
    assert name == "layer" and [row["name"] for row in payload["rows"]] == list(modes)
    for row in payload["rows"]:
        assert row["ms"] > 0 and not row.get("failed")
    times = {row["name"]: row["ms"] for row in payload["rows"]}
    ratio = payload["ratios"]["bf16_fused_vs_eager"]
    assert ratio == pytest.approx(times["flat-bf16-fused"] / times["eager"])
    # 6 per weight and token; attention, causal, half of 2 GEMMs of 2 * seq * hidden per token, three times.
    weights = 4 * 64**2 + 2 * 64 * 128
    assert payload["flops"] == 32 * (6 * weights + 6 * 16 * 64)


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [
        (4, [1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        (0, [rate / 8 for rate in range(8, 0, -1)]),
    ],
)
def test_the_learning_rate_rises_and_falls_linearly(
    benchmarks: Callable[[str], Any], warm_up: int, expected: list[float]
) -> None:
    parameter = nn.Parameter(torch.zeros(()))
    parameter.grad = torch.ones(())
    optimizer = benchmarks("lib.hf_training").decaying(8, warm_up, [parameter], lr=1.0)
    for rate in expected:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()


def test_convergence(tmp_path: Path) -> None:
    shape = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32", "--steps", "20")
    name, payload, _ = run_benchmark("convergence", tmp_path, *shape, "--lr", "3e-3")
    bf16, *fp8 = payload["rows"]
    assert name == "convergence" and [row["precision"] for row in fp8] == [
        "fp8-delayed",
        "fp8-current",
        "fp8-weights",
    ]
    assert bf16["final_loss"] == sum(bf16["losses"][-2:]) / 2 < bf16["first_loss"]
    for row in fp8:
        assert row["losses"] != bf16["losses"]
        assert row["against_bf16"] == pytest.approx(row["final_loss"] / bf16["final_loss"] - 1)
        assert abs(row["against_bf16"]) < 0.02


def test_convergence_of_hf_llama(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32", "--microbatches", "1")
    options = ("--model", "hf-llama", "--seeds", "2", "--steps", "10", "--lr", "3e-3")
    name, payload, _ = run_benchmark("convergence", tmp_path, *shape, *options)
    plain, fused, *fp8 = payload["rows"]
    assert name == "convergence-hf-llama" and [plain["precision"], fused["precision"]] == [
        "bf16",
        "bf16-fused",
    ]
    assert [row["precision"] for row in fp8] == ["fp8-delayed", "fp8-current", "fp8-weights"]
    assert plain["runs"][0] != plain["runs"][1], "a seed changes weights and data"
    # Only rounding differs: as many weights and tokens, from the same start.
    assert fused["runs"] != plain["runs"] and abs(fused["against_bf16"]) < 2e-3
    for row in fp8:
        assert row["runs"] != fused["runs"] and abs(row["against_bf16"]) < 0.02
    for row in payload["rows"]:
        assert row["final_loss"] < row["first_loss"]
        assert row["final_loss"] == pytest.approx(sum(row["final_losses"]) / 2)
