"""Timing of steps for `step.py` and `hf.py`: the same steps for every engine, one engine after the other.

In:   a `Job`: the variants of a `Workload`, which builds, shards and steps a model in each variant's way.
Out:  a `VariantRuns` for each variant.
Next: `step_report.py` shows and draws them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from flatfsdp import microbatches, replayed
from flatfsdp.comm.launch import Rank
from flatfsdp.engine.api.methods import UnitMethods
from flatfsdp.engine.replay.eager_or_replayed import Replayed
from flatfsdp.engine.whole.units import UnitModule, named_groups
from flatfsdp.profiling.step_time import Breakdown, breakdown, spans_of
from lib.common import on_all_ranks
from lib.device import GIB, allocated_gib, peak_gib, peak_reserved_gib, start_together, timed

SEED = 0
LEARNING_RATE = 1e-4

Batch = tuple[Tensor, ...]


class Variant(Protocol):
    """An engine in one of its modes; hashable, and can be pickled."""

    @property
    def name(self) -> str:
        """The name in files and on the command line."""
        ...

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        ...

    def unavailable(self, device: torch.device) -> str:
        """The reason why it cannot run here; empty if it can."""
        ...


V = TypeVar("V", bound=Variant)
V_contra = TypeVar("V_contra", bound=Variant, contravariant=True)


class Started(NamedTuple):
    """A sharded model, ready for its first step.

    Attributes:
        loss: computes the loss of one microbatch, 0-dim, with its graph.
        is_replayed: whether microbatches go through `flatfsdp.replayed`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch], Tensor]
    is_replayed: bool = False


class Workload(Protocol[V_contra]):
    """The model and data that all variants of a benchmark train; a dataclass that can be pickled."""

    def batches(self, rank: Rank, count: int) -> list[Batch]:
        """The microbatches of a step, the same in every step and for every variant."""
        ...

    def start(
        self, variant: V_contra, reshard: bool, device: torch.device
    ) -> AbstractContextManager[Started]:
        """Builds the model, from torch's default generator, and shards it.

        Process-wide changes of a variant last as long as the context.
        """
        ...


@dataclass(frozen=True)
class Job(Generic[V]):
    """The settings of a measurement.

    Attributes:
        name: name of the files with the results.
        microbatches: microbatches of a step, one sequence each.
        reshard: whether parameters are freed after each forward and backward (ZeRO-3) or kept for a step
            (ZeRO-2).
        steps, warmup: timed steps of each run, and steps before those.
        rounds: number of times that the variants are measured in turn.
        breakdown: whether to profile one more step of each variant and classify its kernels.
        traces: folder for a Chrome trace of that step.
        identity: whether to time FlatFSDP's steps with and without identities in collectives, in turns.
    """

    name: str
    workload: Workload[V]
    microbatches: int
    reshard: bool
    steps: int
    warmup: int
    rounds: int
    variants: tuple[V, ...]
    breakdown: bool
    traces: Path | None
    identity: bool = False

    def order(self) -> list[V]:
        """The order of the runs; the first variant comes again at the end."""
        return [*(self.variants * self.rounds), self.variants[0]]

    def settings(self) -> dict[str, Any]:
        """All settings for a JSON file, including the workload's own."""
        found = asdict(self)
        own = found.pop("workload")
        names = [variant.name for variant in self.variants]
        return {**own, **found, "variants": names, "traces": self.traces is not None}


@dataclass(frozen=True)
class Run:
    """One variant, built, warmed up and timed once.

    Attributes:
        ms: time of each timed step.
        losses: loss of each step, including warm-up; mean over microbatches.
        peak_gib: peak of allocated memory during the timed steps.
        peak_reserved_gib: peak of memory that PyTorch reserved meanwhile, allocated or not.
        leftover_gib: allocated before the model was built: the data, and memory that earlier runs did not
            free.
        static_gib: allocated between two steps, without what was left over.
        reported_gib: the same according to FlatFSDP's memory report; None for other engines.
        buffers: all rows of that report, with bytes.
        breakdown: of one step of rank 0; None if not requested, or without a GPU.
        checked_ms, unchecked_ms: further steps in turns, with and without identities in collectives; None if
            not requested, for other engines, and for replayed ones.
        replays: number of microbatches of the timed steps that were CUDA graphs, which should be all; None if
            none was to be one.
        host_ms: host time of a microbatch without waiting; median over one further step.  None for engines
            other than FlatFSDP, and on CPUs.
    """

    ms: list[float]
    losses: list[float]
    peak_gib: float
    peak_reserved_gib: float
    leftover_gib: float
    static_gib: float
    reported_gib: float | None
    buffers: list[dict[str, Any]]
    breakdown: Breakdown | None
    checked_ms: list[float] | None = None
    unchecked_ms: list[float] | None = None
    replays: int | None = None
    host_ms: float | None = None


@dataclass(frozen=True)
class VariantRuns(Generic[V]):
    """All runs of a variant over all ranks: the slowest one's times, the mean of losses, the highest peak.

    Attributes:
        skipped: why it could not be measured here, or empty.
        failed: error of one of its runs, or empty.
    """

    variant: V
    runs: list[Run]
    skipped: str = ""
    failed: str = ""

    @property
    def ms(self) -> float | None:
        """Median of all timed steps."""
        return statistics.median(ms for run in self.runs for ms in run.ms) if self.runs else None


def measure_all(rank: Rank, job: Job[V]) -> list[VariantRuns[V]]:
    """Measures every variant in turns; all ranks return the same."""
    batches = job.workload.batches(rank, job.microbatches)
    runs: dict[V, list[Run]] = {variant: [] for variant in job.variants}
    skipped = {variant: variant.unavailable(rank.device) for variant in job.variants}
    failed = dict.fromkeys(job.variants, "")
    for variant in job.order():
        if skipped[variant] or failed[variant]:
            continue
        found = on_all_ranks(partial(_measure, variant, job, rank, batches), rank)
        if isinstance(found, str):
            failed[variant] = found
        else:
            runs[variant].append(_over_ranks(found))
        if rank.index == 0:
            outcome = failed[variant] or _outcome(runs[variant][-1])
            print(f"{variant.label}: {outcome}", file=sys.stderr, flush=True)
    return [VariantRuns(v, runs[v], skipped[v], failed[v]) for v in job.variants]


def _outcome(run: Run) -> str:
    losses = " ".join(f"{loss:.5f}" for loss in run.losses)
    return f"{statistics.median(run.ms):.1f} ms/step, peak {run.peak_gib:.1f} GiB, losses {losses}"


def _measure(variant: V, job: Job[V], rank: Rank, batches: list[Batch]) -> Run:
    leftover = allocated_gib(rank.device)
    torch.manual_seed(SEED)
    with job.workload.start(variant, job.reshard, rank.device) as started:
        return _measure_steps(started, variant, job, rank, batches, leftover)


def _measure_steps(
    started: Started, variant: V, job: Job[V], rank: Rank, batches: list[Batch], leftover: float
) -> Run:
    """Warms up, and times the steps.

    Args:
        job: the settings.
        variant: the engine.
        started: its model.
        batches: microbatches of a step.
        rank: this rank.
        leftover: GiB allocated before the model was built.
    """
    model, optimizer, loss_of, is_replayed = started
    is_timed_on_host = isinstance(model, UnitMethods) and rank.device.type == "cuda"

    def forward_backward(batch: Batch) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        return loss.detach()

    microbatch = replayed(model, forward_backward) if is_replayed else forward_backward

    def step(run: Callable[[Batch], Tensor] = microbatch) -> Tensor:
        losses = []
        for index, batch in enumerate(microbatches(model, batches)):
            with _position(model, index == len(batches) - 1, job.reshard):
                losses.append(run(batch))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    losses = [step() for _ in range(job.warmup)]
    replays_before = _replays_of(microbatch)
    start_together(rank.device)
    milliseconds = timed(lambda: losses.append(step()), job.steps, rank.device)
    peak, peak_reserved = peak_gib(rank.device), peak_reserved_gib(rank.device)
    replays = _replays_of(microbatch) - replays_before if is_replayed else None
    checked, unchecked = None, None
    if job.identity and isinstance(model, UnitMethods) and not is_replayed:
        checked, unchecked = _by_turns(model, lambda: losses.append(step()), job.steps, rank.device)
    host_ms = _host_ms(microbatch, lambda run: losses.append(step(run))) if is_timed_on_host else None
    values = torch.stack(losses).tolist()
    # With NaN in the data a GPU draws less power and runs faster: such a time is invalid.
    wrong = [index for index, value in enumerate(values) if not math.isfinite(value)]
    if wrong:
        raise FloatingPointError(f"the loss of step {wrong[0]} is {values[wrong[0]]}")
    static = allocated_gib(rank.device) - leftover
    report = model.memory_report(optimizer) if isinstance(model, UnitMethods) else None
    profiled = _profile(step, job, variant, rank) if job.breakdown or job.traces is not None else None
    return Run(
        ms=milliseconds,
        losses=values,
        peak_gib=peak,
        peak_reserved_gib=peak_reserved,
        leftover_gib=leftover,
        static_gib=static,
        reported_gib=None if report is None else report.static / GIB,
        buffers=[] if report is None else [{**asdict(row), "dtype": str(row.dtype)} for row in report.rows],
        breakdown=profiled,
        checked_ms=checked,
        unchecked_ms=unchecked,
        replays=replays,
        host_ms=host_ms,
    )


def _replays_of(microbatch: object) -> int:
    return microbatch.replays if isinstance(microbatch, Replayed) else 0


def _host_ms(
    microbatch: Callable[[Batch], Tensor], step: Callable[[Callable[[Batch], Tensor]], None]
) -> float:
    """Milliseconds of the host for a microbatch, as the median of a step's.

    The GPU is idle before each: a host that runs too far ahead has to wait, and that is not its own time.
    """
    times: list[float] = []

    def timed_microbatch(batch: Batch) -> Tensor:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = microbatch(batch)
        times.append(1e3 * (time.perf_counter() - start))
        return loss

    step(timed_microbatch)
    return statistics.median(times)


def _position(model: nn.Module, is_last: bool, reshard: bool) -> AbstractContextManager[None]:
    """Tells engines other than FlatFSDP whether the microbatch inside is the last one of its step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        # Without this FSDP2 gathers anew in every microbatch even when it keeps parameters after forward.
        model.set_reshard_after_backward(is_last or reshard)
    elif not isinstance(model, UnitModule) and not is_last:
        return model.no_sync()  # type: ignore[operator]
    return nullcontext()


def _by_turns(
    model: nn.Module, step: Callable[[], None], steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Milliseconds of steps with identities in collectives, and of steps without, in turns."""
    shared = {group.unit.shared for _, group in named_groups(model)}
    turn = itertools.cycle((True, False))

    def next_step() -> None:
        is_checked = next(turn)
        for each in shared:
            each.checks = is_checked
        step()

    milliseconds = timed(next_step, 2 * steps, device)
    for each in shared:
        each.checks = True
    return milliseconds[::2], milliseconds[1::2]


def _profile(step: Callable[[], Tensor], job: Job[V], variant: V, rank: Rank) -> Breakdown | None:
    """Profiles one step on rank 0: its GPU's kernels, and a Chrome trace if requested."""
    if rank.index != 0:
        step()
        return None
    # Recording every operator of the host would create gaps that are not real.
    activities = [ProfilerActivity.CUDA] if job.traces is None and rank.device.type == "cuda" else None
    with profile(activities=activities) as recorded:
        step().item()
    if job.traces is not None:
        job.traces.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(job.traces / f"{job.name}-{variant.name}.json"))
    return breakdown(spans_of(recorded)) if job.breakdown else None


def _over_ranks(runs: list[Run]) -> Run:
    return Run(
        ms=[max(step) for step in zip(*(run.ms for run in runs), strict=True)],
        losses=[statistics.fmean(step) for step in zip(*(run.losses for run in runs), strict=True)],
        peak_gib=max(run.peak_gib for run in runs),
        peak_reserved_gib=max(run.peak_reserved_gib for run in runs),
        leftover_gib=max(run.leftover_gib for run in runs),
        # From one rank, so that the numbers belong together.
        static_gib=runs[0].static_gib,
        reported_gib=runs[0].reported_gib,
        buffers=runs[0].buffers,
        breakdown=runs[0].breakdown,
        checked_ms=_slowest(run.checked_ms for run in runs),
        unchecked_ms=_slowest(run.unchecked_ms for run in runs),
        replays=_least(run.replays for run in runs),
        host_ms=max((run.host_ms for run in runs if run.host_ms is not None), default=None),
    )


def _least(of_ranks: Iterable[int | None]) -> int | None:
    return min((count for count in of_ranks if count is not None), default=None)


def _slowest(of_ranks: Iterable[list[float] | None]) -> list[float] | None:
    """Each step's time on the slowest rank."""
    found = [milliseconds for milliseconds in of_ranks if milliseconds is not None]
    return [max(step) for step in zip(*found, strict=True)] if found else None
