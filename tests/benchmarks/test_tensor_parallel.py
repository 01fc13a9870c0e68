"""The benchmark of tensor parallelism measures ours beside PyTorch's, and refuses layers with errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatfsdp.comm.ranks import ALONE
from tests.support.programs import run_benchmark

MEASURED = ("flat-bf16-one", "torch-tp", "flat-bf16-tp", "torch-sp", "flat-bf16-sp", "flat-fp8-sp")


def test_ours_beside_pytorch(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--steps", "1", "--warmup", "1", "--json"]
    # Rows have their own order.
    for name in ("flat-fp8-overlap", *reversed(MEASURED)):
        options += ["--modes", name]
    name, payload, printed = run_benchmark("tensor_parallel", tmp_path, *options)
    assert name == "tensor-parallel-tiny-2" and printed.startswith("[")

    rows = {row["name"]: row for row in payload["rows"]}
    assert "GPUs only" in rows.pop("flat-fp8-overlap")["skipped"]
    assert tuple(rows) == MEASURED
    # qkv, out, gate and up, down: 6 operations per weight and token; causal attention, both ways.
    weights = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    assert payload["flops"] == 32 * (6 * weights + 6 * 64 * 32)
    peer = min(rows["torch-tp"]["ms"], rows["torch-sp"]["ms"])
    for name, row in rows.items():
        share = 1 if row["split"] == "one" else 2
        assert row["tflops_per_rank"] == pytest.approx(payload["flops"] / share / row["ms"] / 1e9)
        assert row["time_vs_pytorch"] == (None if row["split"] == "one" else row["ms"] / peer)
        alone = rows["flat-bf16-one"]["ms"] if name.startswith("flat-bf16") else None
        assert row["speedup"] == (None if alone is None else alone / row["ms"])

    # Half of each tensor is sent: two bytes per element, one if gathered in FP8.
    sums, gathers = 2, 2
    sent = {name: row["bytes_sent_per_element"] for name, row in rows.items()}
    assert sent["flat-bf16-one"] == 0
    assert sent["torch-tp"] == sent["flat-bf16-tp"] == 2 * sums * 2.0
    assert sent["torch-sp"] == 2 * (gathers + sums)
    # Ours gathers inputs again for the weights' gradients.
    assert sent["flat-bf16-sp"] == 3 * gathers + 2 * sums
    scales = rows["flat-fp8-sp"]["runs"][0]["sent"]["all-reduce"] / (32 * 64)
    assert sent["flat-fp8-sp"] - scales == 3 * gathers / 2 + 2 * sums
    assert rows["flat-bf16-sp"]["runs"][0]["calls"] == {"all-gather": 6, "reduce-scatter": 4}

    errors = {name: row["largest_error"] for name, row in rows.items()}
    assert errors["flat-bf16-one"]["whole"] == 0
    assert all(0 < errors[name]["whole"] < 0.02 for name in rows if name != "flat-bf16-one")
    assert 0.02 < errors["flat-fp8-sp"]["plain"] < 0.2, "nothing was in FP8"


def test_layers_that_err_are_refused(benchmarks: Callable[[str], Any]) -> None:
    measuring, layers = benchmarks("lib.split_measuring"), benchmarks("lib.split_layers")
    problem = layers.Problem.of(layers.LAYERS["tiny"], 1, ALONE, torch.device("cpu"))
    mode = layers.MODES["torch-one"]
    right = layers.whole_results(mode.engine, problem)
    expected = {mode.engine: right}

    def compare(results: dict[str, torch.Tensor]) -> None:
        measuring._compare(mode, SimpleNamespace(results=lambda: results), problem, expected)

    compare(right)
    compare({name: tensor * 1.005 for name, tensor in right.items()})
    wrong = {"output": 1.04, "input": 1.05, "mlp.down.weight": 0.0, "norm_mlp.weight": torch.nan}
    for name, factor in wrong.items():
        with pytest.raises(ArithmeticError, match=rf"{name} is off by \S+ of its norm, beside the whole"):
            compare({**right, name: right[name] * factor})
    with pytest.raises(ValueError, match="the shape is"):
        compare({**right, "output": right["output"][:1]})


def test_the_first_shape_is_compiled_too(benchmarks: Callable[[str], Any]) -> None:
    benchmark = benchmarks("tensor_parallel")
    first, other = (benchmark.modes_of([], is_first=is_first) for is_first in (True, False))
    assert {mode.name for mode in set(first) - set(other)} == {
        *("torch-compile-sp", "torch-compile-overlap", "torchao-sp")
    }
    assert benchmark.modes_of(["torchao-tp"], is_first=False) == (benchmark.MODES["torchao-tp"],)
    with pytest.raises(benchmark.typer.BadParameter, match="'torch-overlap' is not one of"):
        benchmark._known(["torch-overlap"], benchmark.MODES)
