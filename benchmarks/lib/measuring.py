"""How `step.py` times a training step: the same steps for every engine, one engine after the other."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import microbatches
from flatfsdp.engine.methods import UnitMethods
from flatfsdp.engine.units import named_groups
from flatfsdp.launch import Rank
from flatfsdp.profiling.trace import Breakdown, breakdown, spans_of
from lib.common import on_all_ranks
from lib.device import GIB, allocated_gib, peak_gib, start_together, timed
from lib.engines import PLAIN, Variant, adamw, position, shard
from lib.llama import SHAPES, Llama, LlamaConfig

SEED = 0
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Job:
    """What every rank measures.

    Attributes:
        shape: key of `SHAPES`.
        reshard: parameters are freed after each forward and backward (ZeRO-3), or kept for a step (ZeRO-2).
        steps, warmup: of each run, timed and before those.
        rounds: how often the variants are measured in turn.
        own_adamw: engines of FlatFSDP's own layers have its own AdamW, too.
        breakdown: profile one more step of each variant and sort its kernels.
        traces: folder for a Chrome trace of that step.
        identity: time FlatFSDP's steps whose collectives carry what they are for by turns with others.
    """

    shape: str
    microbatches: int
    reshard: bool
    steps: int
    warmup: int
    rounds: int
    variants: tuple[Variant, ...]
    own_adamw: bool
    breakdown: bool
    traces: Path | None
    identity: bool = False

    @property
    def config(self) -> LlamaConfig:
        return SHAPES[self.shape]

    @property
    def name(self) -> str:
        zero = "reshard" if self.reshard else "keep"
        fp8 = "" if all(variant.engine in PLAIN for variant in self.variants) else "-fp8"
        return f"step-{self.shape}-m{self.microbatches}-{zero}{fp8}"

    def order(self) -> list[Variant]:
        return [*(self.variants * self.rounds), self.variants[0]]


@dataclass(frozen=True)
class Run:
    """One variant, built, warmed up and timed once.

    Attributes:
        ms: of each timed step.
        losses: of each step, those of warm-up included; mean over microbatches.
        peak_gib: most memory allocated during the timed steps.
        leftover_gib: allocated before the model was built: the data, and what earlier runs did not free.
        static_gib: allocated between two steps, without what was left over.
        reported_gib: what FlatFSDP's memory report says about that; None for other engines.
        buffers: all rows of that report, with bytes.
        breakdown: of one step of rank 0; None if it was not asked for, or without a GPU.
        checked_ms, unchecked_ms: of further steps, by turns, whose collectives carry what they are for, and
            of such that do not; None if that was not asked for, and for other engines.
    """

    ms: list[float]
    losses: list[float]
    peak_gib: float
    leftover_gib: float
    static_gib: float
    reported_gib: float | None
    buffers: list[dict[str, Any]]
    breakdown: Breakdown | None
    checked_ms: list[float] | None = None
    unchecked_ms: list[float] | None = None


@dataclass(frozen=True)
class VariantRuns:
    """All runs of a variant, over all ranks: the slowest one's times, the mean of losses, the highest peak.

    Attributes:
        skipped: why it could not be measured here, or empty.
        failed: what went wrong in one of its runs, or empty.
    """

    variant: Variant
    runs: list[Run]
    skipped: str = ""
    failed: str = ""

    @property
    def ms(self) -> float | None:
        """Median of all timed steps."""
        return statistics.median(ms for run in self.runs for ms in run.ms) if self.runs else None


def measure_all(rank: Rank, job: Job) -> list[VariantRuns]:
    """On one rank: every variant, by turns; all ranks return the same."""
    batches = _batches(job, rank)
    runs: dict[Variant, list[Run]] = {variant: [] for variant in job.variants}
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


def _measure(variant: Variant, job: Job, rank: Rank, batches: list[tuple[Tensor, ...]]) -> Run:
    leftover = allocated_gib(rank.device)
    torch.manual_seed(SEED)
    # Where it will be sharded: a host may not have room for an FP32 copy of the model for each rank.
    with rank.device:
        plain = Llama(job.config)
    model = shard(plain, variant, job.reshard, rank.device)
    del plain
    optimizer = adamw(model, variant, LEARNING_RATE, own=job.own_adamw)

    def step() -> Tensor:
        losses = []
        for index, batch in enumerate(microbatches(model, batches)):
            with position(model, index == len(batches) - 1, job.reshard):
                loss = model(*batch)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    losses = [step() for _ in range(job.warmup)]
    start_together(rank.device)
    milliseconds = timed(lambda: losses.append(step()), job.steps, rank.device)
    peak = peak_gib(rank.device)
    checked, unchecked = None, None
    if job.identity and isinstance(model, UnitMethods):
        checked, unchecked = _by_turns(model, lambda: losses.append(step()), job.steps, rank.device)
    values = torch.stack(losses).tolist()
    # With NaN in the data a GPU draws less power and runs faster: such a time is no result.
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
        leftover_gib=leftover,
        static_gib=static,
        reported_gib=None if report is None else report.static / GIB,
        buffers=[] if report is None else [{**asdict(row), "dtype": str(row.dtype)} for row in report.rows],
        breakdown=profiled,
        checked_ms=checked,
        unchecked_ms=unchecked,
    )


def _by_turns(
    model: nn.Module, step: Callable[[], None], steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Milliseconds of steps whose collectives carry what they are for, and of those between, which do not."""
    groups = [group for _, group in named_groups(model)]
    carried = [group.model for group in groups]
    turn = itertools.cycle((True, False))

    def next_step() -> None:
        is_checked = next(turn)
        for group, identity in zip(groups, carried, strict=True):
            group.model = identity if is_checked else None
        step()

    milliseconds = timed(next_step, 2 * steps, device)
    for group, identity in zip(groups, carried, strict=True):
        group.model = identity
    return milliseconds[::2], milliseconds[1::2]


def _profile(step: Callable[[], Tensor], job: Job, variant: Variant, rank: Rank) -> Breakdown | None:
    """Profiles one step on rank 0: what its GPU did, and a Chrome trace if that is wanted."""
    if rank.index != 0:
        step()
        return None
    # Recording every operator of the host would make gaps that are not there.
    activities = [ProfilerActivity.CUDA] if job.traces is None and rank.device.type == "cuda" else None
    with profile(activities=activities) as recorded:
        step().item()
    if job.traces is not None:
        job.traces.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(job.traces / f"{job.name}-{variant.name}.json"))
    return breakdown(spans_of(recorded)) if job.breakdown else None


def _batches(job: Job, rank: Rank) -> list[tuple[Tensor, ...]]:
    """One sequence for each microbatch, the same in every step and for every engine."""
    config, device = job.config, rank.device
    generator = torch.Generator(device).manual_seed(SEED + 1 + rank.index)

    def batch() -> tuple[Tensor, ...]:
        if not config.vocab:
            shape = (1, config.seq, config.hidden)
            return (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16),)
        tokens = torch.randint(config.vocab, (1, config.seq + 1), generator=generator, device=device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (inputs, targets) if config.loss == "cross-entropy" else (inputs,)

    return [batch() for _ in range(job.microbatches)]


def _over_ranks(runs: list[Run]) -> Run:
    return Run(
        ms=[max(step) for step in zip(*(run.ms for run in runs), strict=True)],
        losses=[statistics.fmean(step) for step in zip(*(run.losses for run in runs), strict=True)],
        peak_gib=max(run.peak_gib for run in runs),
        leftover_gib=max(run.leftover_gib for run in runs),
        # As one rank has them, so that they belong together.
        static_gib=runs[0].static_gib,
        reported_gib=runs[0].reported_gib,
        buffers=runs[0].buffers,
        breakdown=runs[0].breakdown,
        checked_ms=_slowest(run.checked_ms for run in runs),
        unchecked_ms=_slowest(run.unchecked_ms for run in runs),
    )


def _slowest(of_ranks: Iterable[list[float] | None]) -> list[float] | None:
    """Each step's time on the rank that took longest."""
    found = [milliseconds for milliseconds in of_ranks if milliseconds is not None]
    return [max(step) for step in zip(*found, strict=True)] if found else None
