"""`Metrics` and its logs: figures of a loop equal those computed by hand."""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import replayed, shard
from flatfsdp.models import LlamaConfig, flops_per_token
from flatfsdp.profiling import LogName, Metrics, open_logs, require_logs
from flatfsdp.profiling.metrics import PEAKS
from tests.support.assertions import assert_raises
from tests.support.published import results
from tests.support.ranks import on_ranks


class Clock:
    """Stands for the wall clock."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


def test_figures_by_hand(clock: Clock) -> None:
    metrics = Metrics("cpu", flops_per_token=3e9, peak_flops=120e12)
    for _ in range(2):
        metrics.count(5_000)
        clock.now += 0.5
    with metrics.loading():
        clock.now += 1.0
    with metrics.paused():
        clock.now += 40.0
    found = metrics.report(loss=torch.tensor(2.5), lr=0.1, norm=None)
    # 10,000 tokens in 2 s, 3e13 operations: 15e12 a second.
    expected = {
        **{"loss": 2.5, "lr": 0.1, "norm": None, "tokens_per_s": 5_000, "tflops_per_rank": 15, "mfu": 0.125},
        **{"data_s": 1.0, "data_share": 0.5, "peak_reserved_gib": None, "replayed": None},
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < (found["peak_gib"] or 0) < 1000
    # The next interval begins with nothing; operations may be counted instead.
    clock.now += 1.0
    metrics.count(10, flops=6e12)
    found = metrics.report()
    assert (found["tokens_per_s"], found["tflops_per_rank"], found["data_s"]) == pytest.approx((10, 6, 0))
    assert found["mfu"] == pytest.approx(0.05)


def test_what_is_not_known_is_none(clock: Clock) -> None:
    metrics = Metrics("cpu", flops_per_token=1e12)
    clock.now += 1.0
    assert metrics.peak_flops is None and "no known peak" in repr(metrics)
    found = metrics.report()
    assert found["tokens_per_s"] is found["tflops_per_rank"] is found["mfu"] is None
    metrics.count(1)
    clock.now += 1.0
    found = metrics.report()
    assert found["tflops_per_rank"] == pytest.approx(1) and found["mfu"] is None


@pytest.mark.parametrize(("name", "gemms"), [("flat-on", "bf16"), ("flat-fp8-delayed", "fp8")])
def test_mfu_is_the_benchmarks_speed_over_the_peak(clock: Clock, name: str, gemms: Any) -> None:
    found = results(f"step-8b-m1-reshard{'-fp8' * (gemms == 'fp8')}.json")
    (row,) = (row for row in found["rows"] if row["name"] == name)
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "seq", "vocab")
    sizes = LlamaConfig(**{each: found["config"][each] for each in names})
    peak = PEAKS[found["environment"]["name"]][gemms]
    metrics = Metrics("cpu", flops_per_token=flops_per_token(sizes), gemms=gemms, peak_flops=peak)
    metrics.count(sizes.seq)
    clock.now += row["ms"] / 1e3
    shown = metrics.report()
    assert shown["tflops_per_rank"] == pytest.approx(row["tflops_per_rank"], rel=1e-3)
    assert shown["mfu"] == pytest.approx(row["tflops_per_rank"] * 1e12 / peak, rel=1e-3)


def test_the_peak_is_found_by_the_whole_name_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: next(names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    peaks = [Metrics("cuda", gemms=gemms).peak_flops for gemms in ("fp8", "bf16", "fp32")]
    assert peaks == [1978.9e12, None, None]


def test_the_share_of_replayed_microbatches() -> None:
    model = shard(nn.Linear(2, 2))
    step = replayed(model, lambda x: model(x).sum().backward())
    metrics = Metrics("cpu", replayed=step)
    for _ in range(4):
        step(torch.ones(1, 2))
    assert step.calls == 4
    step.replays += 3  # which only GPUs do
    assert metrics.report()["replayed"] == 0.75
    with torch.no_grad():
        assert_raises(RuntimeError, "does not require grad", step, torch.ones(1, 2))
    assert metrics.report()["replayed"] is None


def test_wrong_arguments() -> None:
    assert_raises(ValueError, "it has to be one of fp32, bf16, fp8", Metrics, "cpu", gemms="int8")
    assert_raises(ValueError, "flops_per_token is 0", Metrics, "cpu", flops_per_token=0)
    assert_raises(TypeError, "pass what flatfsdp.replayed returns", Metrics, "cpu", replayed=print)


@on_ranks(3)
def test_figures_are_of_all_ranks(rank: int, world_size: int) -> None:
    metrics = Metrics("cpu", flops_per_token=1e9, peak_flops=None if rank == 2 else 1e12)
    metrics.count(100 * (rank + 1))
    with metrics.loading():
        time.sleep(0.1 * rank)
    found = metrics.report(loss=float(rank), norm=torch.tensor(float(rank)))
    interval = 600 / (found["tokens_per_s"] or 1)
    # All wait for the last rank.  A rank without a known peak leaves all without MFU.
    assert 0.2 <= (found["data_s"] or 0) < interval < 60 and found["mfu"] is None
    assert found["data_share"] == pytest.approx((found["data_s"] or 0) / interval)
    assert found["tflops_per_rank"] == pytest.approx(600e9 / interval / 3 / 1e12)
    assert (found["loss"], found["norm"]) == (rank, rank)


# ---- logs --------------------------------------------------------------------------------------------------


class Writer:
    """Stands for TensorBoard's SummaryWriter, and for a run of Weights & Biases."""

    def __init__(self, *told: Any, **options: Any) -> None:
        self.told: list[Any] = [*told, options]

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: self.told.append((name, *words, *options.values()))


def test_each_log_gets_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Writer] = []

    def make(*told: Any, **options: Any) -> Writer:
        made.append(Writer(*told, **options))
        return made[-1]

    for name, attribute in (("torch.utils.tensorboard", "SummaryWriter"), ("wandb", "init")):
        stand_in = ModuleType(name)
        stand_in.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        vars(stand_in)[attribute] = make
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setitem(sys.modules, "tensorboard", sys.modules["wandb"])
    for first in (1, 2):
        logs = open_logs(("jsonl", "tensorboard", "wandb", "jsonl"), tmp_path, {"lr": 0.1}, first=first)
        assert len(logs) == 3
        for log in logs:
            log.write(first, {"loss": math.nan, "mfu": None, "norm": 0.5})
            log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, "loss": None, "mfu": None, "norm": 0.5} for step in (1, 2)
    ]
    board, run = (each.told for each in made[:2])
    assert board[:2] == [str(tmp_path / "tensorboard"), {"purge_step": 1}] and board[2][0] == "add_text"
    assert board[4:] == [("add_scalar", "norm", 0.5, 1), ("close",)]
    assert run[0] == {"dir": str(tmp_path), "config": {"lr": 0.1}, "resume": "auto"}
    assert run[1][1].keys() == {"loss", "norm"} and run[1][2] == 1 and run[2] == ("finish",)


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # A run that was killed after step 7, and goes on after step 5.
    for first, last, loss in ((1, 7, 0.5), (6, 8, 0.25)):
        (log,) = open_logs(["tensorboard"], tmp_path, first=first)
        for step in range(first, last + 1):
            log.write(step, {"loss": loss, "mfu": None})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(step, 0.5 if step < 6 else 0.25) for step in range(1, 9)]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatfsdp.profiling.logs.find_spec", lambda _: None)
    require_logs([LogName.jsonl])
    need = partial(require_logs, ["jsonl", "wandb"])
    assert_raises(ModuleNotFoundError, "a log to wandb needs its package: pip install wandb", need)
    assert_raises(ValueError, "'csv' is not a valid LogName", require_logs, ["csv"])
    assert_raises(ValueError, "URL|s3", open_logs, [], "s3://bucket/run")
