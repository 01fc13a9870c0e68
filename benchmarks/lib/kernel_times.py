"""Timing of calls for `kernels.py`: in turns, in random order, on data that are in no cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import typer
from torch import Tensor

from lib.common import progress_bar
from lib.kernel_cases import IN_PLACE, SEPARATE, Bench, Call, Case, Gemm

WGRAD = "wgrad"
"""Name of the weight gradients when kernels are selected."""

TARGETS = {"norm_backward": 0.75}
"""Target shares of the bandwidth of an equal copy, if they differ from `TARGET`."""
TARGET = 0.85
RATIO_TARGETS = {"FP8": 1.10}
"""Target speeds of weight gradients in place, relative to a GEMM and an addition."""

BATCH_SECONDS = 4e-3
MOST_CALLS = 50
SLEEP_CYCLES_PER_SECOND = 2e9
"""Assumed clock of the GPU; at a lower one it sleeps longer."""


class Timed:
    """One thing to time: calls that run in turns, and the microseconds of each batch.

    Attributes:
        us: microseconds of one call, for each batch.
    """

    def __init__(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        self.name, self.us = name, list[float]()
        self._calls, self._device = calls, device
        # Results stay until their turn comes again, so that each is written to other memory than the last.
        self._results: list[object] = [None] * len(calls)
        self._turn = 0
        self._batch, self._host_seconds = len(calls), 0.0

    def _run(self) -> None:
        self._results[self._turn] = self._calls[self._turn]()
        self._turn = (self._turn + 1) % len(self._calls)

    def warm_up(self) -> None:
        """Compiles, and determines how many calls make a batch and how long the host takes for one."""
        for _ in self._calls:
            self._run()
        _wait(self._device)
        start = time.perf_counter()
        for _ in self._calls:
            self._run()
        self._host_seconds = (time.perf_counter() - start) / len(self._calls)
        _wait(self._device)
        seconds = (time.perf_counter() - start) / len(self._calls)
        self._batch = min(MOST_CALLS, max(len(self._calls), int(BATCH_SECONDS / seconds)))

    def measure(self) -> None:
        """Times one batch of calls."""
        self.us.append(1e6 * self._seconds() / self._batch)

    def _seconds(self) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            for _ in range(self._batch):
                self._run()
            return time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2 * self._host_seconds * self._batch * SLEEP_CYCLES_PER_SECOND))
        events[0].record()
        for _ in range(self._batch):
            self._run()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    def check(self) -> None:
        """Checks the results.

        Raises:
            FloatingPointError: if a result is not finite.
        """
        for result in self._results:
            for tensor in _tensors(result):
                # FP8 has no isfinite.
                values = tensor.bfloat16() if tensor.dtype.itemsize == 1 else tensor
                if not bool(values.isfinite().all()):
                    raise FloatingPointError(
                        f"{self.name}: a result is not finite; NaNs run faster, so its time means nothing"
                    )


def _tensors(result: object) -> Iterable[Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    return (tensor for tensor in found if isinstance(tensor, Tensor))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(timed: Sequence[Timed], rounds: int, what: str) -> None:
    """Measures all of them in turns, in another random order in each round."""
    order, shuffle = list(timed), random.Random(0).shuffle
    with progress_bar() as bar:
        task = bar.add_task(f"{what}: compile", total=len(order))
        for one in order:
            one.warm_up()
            bar.advance(task)
        task = bar.add_task(f"{what}: measure", total=rounds * len(order))
        for _ in range(rounds):
            shuffle(order)
            for one in order:
                one.measure()
                bar.advance(task)
    for one in order:
        one.check()


def measured_kernels(bench: Bench, only: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each case; the first is the large copy.

    `share` is a bandwidth divided by that copy's, `share_of_equal` by that of a copy of as many bytes.

    Raises:
        typer.BadParameter: if `only` has a name that is neither a kernel's nor wgrad.
    """
    copy, *cases = bench.cases()
    known = {case.kernel for case in cases} | {WGRAD}
    for name in set(only) - known:
        raise typer.BadParameter(f"there is no kernel {name!r}; known are {', '.join(sorted(known))}")
    cases = [case for case in cases if not only or case.kernel in only]
    if not cases:
        return []
    cases = [copy, *cases]
    copies = [bench.copy_of(nbytes) for nbytes in dict.fromkeys(case.bytes for case in cases) if nbytes]
    everything = [*cases, *copies]
    timed = [Timed(f"{case.kernel} {case.variant}", case.calls(), bench.device) for case in everything]
    measure(timed, rounds, "kernels")
    rows = [_kernel_row(case, times.us) for case, times in zip(everything, timed, strict=True)]
    bandwidths = {row["bytes"]: row["tb_s"] for row in rows[len(cases) :]}
    del rows[len(cases) :]
    for case, row in zip(cases, rows, strict=True):
        if case.bytes is not None:
            row["share"] = row["tb_s"] / rows[0]["tb_s"]
            row["share_of_equal"] = row["tb_s"] / bandwidths[case.bytes]
            if case is not copy and bench.device.type == "cuda":
                row["reached"] = row["share_of_equal"] >= TARGETS.get(case.kernel, TARGET)
    return rows


def _kernel_row(case: Case, us_of_each_round: list[float]) -> dict[str, Any]:
    us = statistics.median(us_of_each_round)
    return {
        "kernel": case.kernel,
        "variant": case.variant,
        "size": case.size,
        "bytes": case.bytes,
        "us": us,
        "tb_s": None if case.bytes is None else case.bytes / us / 1e6,
        "share": None,
        "share_of_equal": None,
        "reached": None,
        "us_of_each_round": us_of_each_round,
    }


def measured_gemms(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """One row for each path and shape; `ratio` is the speed relative to a GEMM and an addition."""
    gemms = list(bench.gemms())
    timed = [Timed(f"{gemm.shape}, {gemm.dtype} {gemm.path}", [gemm.call], bench.device) for gemm in gemms]
    measure(timed, rounds, "weight gradients")
    rows = [_gemm_row(gemm, times.us) for gemm, times in zip(gemms, timed, strict=True)]
    separate = {(row["shape"], row["dtype"]): row["us"] for row in rows if row["path"] == SEPARATE}
    for row in rows:
        row["ratio"] = separate[row["shape"], row["dtype"]] / row["us"]
        if row["path"] == IN_PLACE and row["dtype"] in RATIO_TARGETS and bench.device.type == "cuda":
            row["reached"] = row["ratio"] >= RATIO_TARGETS[row["dtype"]]
    return rows


def _gemm_row(gemm: Gemm, us_of_each_round: list[float]) -> dict[str, Any]:
    us = statistics.median(us_of_each_round)
    return {
        "shape": gemm.shape,
        "out": gemm.out,
        "in": gemm.inner,
        "tokens": gemm.tokens,
        "dtype": gemm.dtype,
        "path": gemm.path,
        "us": us,
        "tflops": gemm.flops / us / 1e6,
        "ratio": None,
        "reached": None,
        "us_of_each_round": us_of_each_round,
    }
