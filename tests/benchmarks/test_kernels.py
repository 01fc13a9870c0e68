"""The kernels benchmark: every kernel runs and is counted; results that are not finite are refused."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import run_benchmark, run_program

SCRIPT = "benchmarks/kernels.py"
KERNELS = {
    "copy", "cast", "max_abs", "norm_forward", "norm_backward", "activation_forward", "activation_backward",
    "rope", "dropout_forward", "dropout_backward", "transpose_many", "accumulate_many", "add_rows",
    "update_scales",
    "max_abs_many", "cast_many", "embedding_grad", "block_cast", "adamw", "sgd", "column_sum",
    "cross_entropy_statistics", "cross_entropy_grad",
}  # fmt: skip


@pytest.fixture
def helpers(benchmarks: Callable[[str], Any]) -> list[Any]:
    """The modules of cases, of times and of sizes."""
    return [benchmarks(f"lib.kernel_{name}") for name in ("cases", "times", "sizes")]


def test_everything_is_measured_and_written(tmp_path: Path) -> None:
    name, payload, _ = run_benchmark("kernels", tmp_path, "--rounds", "3", "--json")
    assert name == "kernels" and {row["kernel"] for row in payload["kernels"]} == KERNELS
    copy, *kernels = payload["kernels"]
    assert copy["kernel"] == "copy" and copy["share"] == 1
    for row in [copy, *kernels, *payload["wgrad"]]:
        assert len(row["us_of_each_round"]) == payload["rounds"] == 3
        assert row["us"] == statistics.median(row["us_of_each_round"]) > 0
        assert row["reached"] is None, "a CPU has no targets"
    for row in kernels:
        if row["kernel"] == "update_scales":
            assert row["bytes"] is row["share"] is None
        else:
            assert row["tb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e6)
            assert row["share"] == pytest.approx(row["tb_s"] / copy["tb_s"])
            assert row["share_of_equal"] > 0
    for row in payload["wgrad"]:
        assert row["tflops"] == pytest.approx(2 * row["out"] * row["in"] * row["tokens"] / row["us"] / 1e6)
    fused, separate = payload["wgrad"][:2]
    assert separate["ratio"] == 1 and fused["ratio"] == pytest.approx(separate["us"] / fused["us"])


def test_some_kernels_only(tmp_path: Path) -> None:
    only = ("--rounds", "1", "--only", "rope")
    _, payload, printed = run_benchmark("kernels", tmp_path / "all", *only, "--quick")
    assert [row["kernel"] for row in payload["kernels"]] == ["copy", "rope"] and not payload["wgrad"]
    assert "Kernels beside a copy" in printed and "kernels.png" in printed
    assert payload["kernels"][1]["size"] == "48 x 64"
    name, payload, _ = run_benchmark("kernels", tmp_path / "few", *only, "--tokens", "32")
    assert name == "kernels-32" and payload["kernels"][1]["size"] == "32 x 64"
    unknown = run_program(SCRIPT, "--device", "cpu", "--only", "ropes")
    assert unknown.returncode == 2 and "there is no kernel 'ropes'" in unknown.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    done = run_program(SCRIPT)
    assert done.returncode == 2 and "no CUDA device" in done.stderr


def test_bytes_are_those_of_what_is_read_and_written(helpers: list[Any]) -> None:
    """Bytes are counted from the tensors themselves, apart from sums, scales and amaxes."""
    module, _, sizes = helpers
    bench = module.Bench(sizes.TINY, torch.device("cpu"), quick=True)
    tokens, hidden = bench.sizes.tokens, bench.sizes.hidden
    cases: dict[str, Any] = {f"{case.kernel} {case.variant}": case for case in bench.cases()}
    both = cases["cast to E4M3: row, column"]
    result = both.calls()[0]()
    assert both.bytes == 2 * tokens * hidden + result.rowwise.nbytes + result.columnwise.nbytes
    residual = cases["norm_forward RMSNorm, residual, to FP8"]
    result = residual.calls()[0]()
    written = sum(tensor.nbytes for tensor in (result.summed, result.rowwise, result.columnwise))
    assert residual.bytes == 4 * tokens * hidden + written
    gated = cases["activation_backward swiglu, to FP8"]
    result = gated.calls()[0]()
    assert gated.bytes == 3 * tokens * bench.sizes.gated + result.rowwise.nbytes + result.columnwise.nbytes


def test_results_that_are_not_finite_are_refused(helpers: list[Any]) -> None:
    _, times, _ = helpers
    broken = torch.tensor([1.0, torch.nan])
    for result in (broken, (None, broken), broken.to(torch.float8_e4m3fn)):
        timed = times.Timed("broken", [lambda result=result: result], torch.device("cpu"))
        with pytest.raises(FloatingPointError, match="broken: a result is not finite"):
            times.measure([timed], 1, "test")


def test_calls_take_turns_on_different_data(helpers: list[Any]) -> None:
    module, times, sizes = helpers
    seen: list[int] = []
    calls = [lambda index=index: seen.append(index) for index in range(3)]
    timed = times.Timed("turns", calls, torch.device("cpu"))
    timed.warm_up()
    timed.measure()
    assert seen == [index % 3 for index in range(len(seen))] and len(seen) >= 9
    full = module.Bench(sizes.FULL, torch.device("cpu"), quick=False)
    for case in full.cases():
        assert case.copies >= 2 and (case.bytes is None or case.copies * case.bytes >= sizes.FULL.rotation)
