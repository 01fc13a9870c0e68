"""Timing of a layer shared by ranks for `tensor_parallel.py`, and comparison with whole ones.

In:   a `Job`, on every rank.
Out:  a `ModeRuns` for each mode: times, traffic and errors, over all ranks.
Next: `tensor_parallel.py` shows them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flatfsdp.comm.launch import Rank
from flatfsdp.comm.ranks import Ranks
from flatfsdp.profiling.step_time import Breakdown, breakdown, spans_of
from lib.common import on_all_ranks
from lib.device import allocated_gib, host_ms, peak_gib, start_together, timed
from lib.llama import LlamaConfig, flops_per_token
from lib.split_layers import Contestant, Engine, Mode, Problem, Split, build, whole_results
from lib.traffic import Traffic

WHOLE, PLAIN = "whole", "plain"


TOLERANCES = {
    WHOLE: {"bf16": 0.03, "fp8": 0.2},
    PLAIN: {"bf16": 0.03, "fp8": 0.4},
}
"""Largest errors relative to the same engine's layer on one GPU, and to the plain layer in bf16."""


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        config: one layer, with the length of a sequence.
        rounds: number of times that the modes are measured in turn; the first one once more at the end.
        breakdown: whether to profile one more step of each mode and classify its kernels.
    """

    shape: str
    config: LlamaConfig
    batch: int
    modes: tuple[Mode, ...]
    steps: int
    warmup: int
    rounds: int
    breakdown: bool

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.batch * self.config.seq

    @property
    def flops(self) -> int:
        """Operations of the whole layer."""
        return self.tokens * flops_per_token(self.config)

    def order(self) -> list[Mode]:
        """The order of the runs; the first mode comes again at the end."""
        return [*(self.modes * self.rounds), self.modes[0]]


@dataclass(frozen=True)
class Run:
    """One mode, built, warmed up and timed once.

    Attributes:
        ms: time of each timed step on the slowest rank.
        host_ms: time of one rank's host to launch a step; None on CPUs, where launching is computing.
        peak_gib: peak of allocated memory during the timed steps, without what is there for the comparison.
        calls, sent: of one step and rank, by kind of collective; None for compiled layers.
        errors: of output and gradients, by their reference; the worst rank's.
        breakdown: of one step of rank 0; None if not requested, or without a GPU.
    """

    ms: list[float]
    host_ms: float | None
    peak_gib: float
    calls: dict[str, int] | None
    sent: dict[str, int] | None
    errors: dict[str, dict[str, float]]
    breakdown: Breakdown | None


@dataclass(frozen=True)
class ModeRuns:
    """All runs of a mode.

    Attributes:
        skipped: why it could not be measured here, or empty.
        failed: its error, or empty.
    """

    mode: Mode
    runs: list[Run]
    skipped: str
    failed: str

    @property
    def ms(self) -> float | None:
        """Median of all timed steps."""
        return statistics.median(ms for run in self.runs for ms in run.ms) if self.runs else None


def measure_all(rank: Rank, jobs: Sequence[Job]) -> list[list[ModeRuns]]:
    """Measures every job's modes in turns; all ranks return the same."""
    return [_measure_job(rank, job) for job in jobs]


def _measure_job(rank: Rank, job: Job) -> list[ModeRuns]:
    problem = Problem.of(job.config, job.batch, Ranks.of(dist.group.WORLD), rank.device)
    expected = {engine: whole_results(engine, problem) for engine in _references(job, rank.device)}
    runs: dict[Mode, list[Run]] = {mode: [] for mode in job.modes}
    skipped = {mode: mode.unavailable(rank.device) for mode in job.modes}
    failed = dict.fromkeys(job.modes, "")
    for mode in job.order():
        if skipped[mode] or failed[mode]:
            continue
        start = time.perf_counter()
        found = on_all_ranks(partial(_measure, mode, job, rank, problem, expected), rank)
        if isinstance(found, str):
            failed[mode] = found
        else:
            runs[mode].append(_over_ranks(found))
        if rank.index == 0:
            outcome = failed[mode] or f"{statistics.median(runs[mode][-1].ms):.3f} ms"
            print(
                f"{job.shape}, {mode.label}: {outcome} ({time.perf_counter() - start:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    return [ModeRuns(mode, runs[mode], skipped[mode], failed[mode]) for mode in job.modes]


def _references(job: Job, device: torch.device) -> list[Engine]:
    """The engines whose whole layer others are compared with."""
    measured = [_eager(mode.engine) for mode in job.modes if not mode.unavailable(device)]
    return list(dict.fromkeys([Engine.torch, *measured]))


def _eager(engine: Engine) -> Engine:
    """The engine whose results compiled code has to reproduce."""
    return Engine.torch if engine is Engine.compiled else engine


References = dict[Engine, dict[str, Tensor]]


def _measure(mode: Mode, job: Job, rank: Rank, problem: Problem, expected: References) -> Run:
    leftover = allocated_gib(rank.device)
    layer = build(mode, problem)
    if mode.engine.is_compiled:
        layer.compile(overlaps=mode.split is Split.overlap)
    for _ in range(job.warmup):
        layer.step()
    traffic = None
    if not mode.engine.is_compiled:
        with Traffic(rank.world) as traffic:
            layer.step()
    start_together(rank.device)
    milliseconds = timed(layer.step, job.steps, rank.device)
    peak = peak_gib(rank.device)
    host = host_ms(layer.step) if rank.device.type == "cuda" else None
    profiled = _profile(layer.step, rank) if job.breakdown and rank.device.type == "cuda" else None
    return Run(
        ms=milliseconds,
        host_ms=host,
        peak_gib=peak - leftover,
        calls=None if traffic is None else dict(traffic.calls),
        sent=None if traffic is None else dict(traffic.sent),
        errors=_compare(mode, layer, problem, expected),
        breakdown=profiled,
    )


def _profile(step: Callable[[], object], rank: Rank) -> Breakdown | None:
    """Profiles rank 0's GPU during one step."""
    if rank.index != 0:
        step()
        return None
    # Recording every operator of the host would create gaps that are not real.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return breakdown(spans_of(recorded))


def _compare(
    mode: Mode, layer: Contestant, problem: Problem, expected: References
) -> dict[str, dict[str, float]]:
    """Errors of this rank's parts, by their reference.

    Raises:
        ArithmeticError: if one is too large; times of a layer that computes something else mean nothing.
    """
    found = layer.results()
    errors: dict[str, dict[str, float]] = {WHOLE: {}, PLAIN: {}}
    for name, mine in found.items():
        part = problem.rows if name in ("output", "input") else partial(problem.part, name)
        for key, engine in ((WHOLE, _eager(mode.engine)), (PLAIN, Engine.torch)):
            errors[key][name] = relative_error(mine, part(expected[engine][name], mode.split))
    for key, tolerances in TOLERANCES.items():
        tolerance = tolerances["fp8" if mode.engine.is_fp8 else "bf16"]
        for name, error in errors[key].items():
            # Written so that NaN fails.
            if not error <= tolerance:
                raise ArithmeticError(
                    f"{name} is off by {error:.2g} of its norm, beside the {key} layer's; rounding explains "
                    f"{tolerance:g}"
                )
    return errors


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """The relative error, |ours - exact| / |exact|."""
    if ours.shape != exact.shape:
        raise ValueError(f"the shape is {tuple(ours.shape)}, and should be {tuple(exact.shape)}")
    return float((ours.float() - exact.float()).norm() / exact.float().norm())


def _over_ranks(runs: list[Run]) -> Run:
    return replace(
        runs[0],
        ms=[max(step) for step in zip(*(run.ms for run in runs), strict=True)],
        peak_gib=max(run.peak_gib for run in runs),
        errors={
            key: {name: max(run.errors[key][name] for run in runs) for name in of_names}
            for key, of_names in runs[0].errors.items()
        },
    )
