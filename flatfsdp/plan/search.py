"""`search`: the fastest ways to spread a Llama over a number of GPUs, among those that fit.

In:   a `Job` whose ranks are to be found, a `Machine`, and the number of sequences in a step.
Out:  `Plan`s, the fastest first.

The times of all ways are estimated from traces of three layers, two for each number of tensor-parallel ranks:
other ranks only change what is sent, and how often each layer runs.  Then ways are planned
from the fastest on, until enough fit.  Of ways that differ only in the number of shards or the microbatch,
the fastest one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.engine.whole.memory import GIB
from flatfsdp.models import LlamaConfig
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.optim.adamw import MOMENTS
from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import in_flight
from flatfsdp.plan.plan import Plan, plan
from flatfsdp.plan.stages import Stage, Tracer, rounds_of
from flatfsdp.plan.time import step_time
from flatfsdp.plan.trace.places import BACKWARD
from flatfsdp.plan.trace.step import Trace, UnitTrace
from flatfsdp.plan.trace.work import Load, total

K = TypeVar("K")
BATCHES = (1, 2, 4, 8)
REFERENCE = Parallelism(dp_shard=2)
"""Ranks of the traces, besides tensor-parallel ones; three microbatches have a first, a middle and a last."""


def search(job: Job, machine: Machine | None = None, *, global_batch: int, count: int = 8) -> list[Plan]:
    """Finds the fastest ways to run a job, the fastest first.

    Args:
        job: the job; its ranks (except their number), schedule, resharding, batch and microbatches are
            replaced.
        machine: None for hosts of eight H200s.
        global_batch: sequences in one step of all ranks.
        count: largest number of plans.

    Raises:
        ValueError: if the model is not a `LlamaConfig`; if the ranks cannot share this many sequences in any
            way, no way has sizes that suit FP8 GEMMs, or nothing fits.
    """
    config, machine = job.model, machine or Machine()
    if not isinstance(config, LlamaConfig):
        raise ValueError("search finds ranks for a LlamaConfig; those of another model share all parameters")
    tracer = Tracer(machine)
    timed: list[tuple[float, float, Job]] = []
    refused: list[ValueError] = []
    for each in _jobs(job, config, machine, global_batch):
        try:
            estimate = _Estimate(each, config, tracer)
        except ValueError as error:
            # Sizes that do not suit FP8 GEMMs; other ways may have other sizes.
            refused.append(error)
            continue
        timed.append((estimate.seconds(machine), estimate.memory(), each))
    if refused and not timed:
        raise refused[0]
    if not timed:
        raise ValueError(
            f"{job.ranks.world} GPUs cannot share {global_batch} sequences, {config.layers} layers and "
            f"{config.kv_heads} groups of heads equally; choose another global batch, such as "
            f"{job.ranks.world}, or number of GPUs"
        )
    timed.sort(key=lambda found: found[0])
    usable, found = machine.usable_memory(), dict[tuple[object, ...], Plan]()
    smallest = math.inf
    more: dict[tuple[object, ...], float] = {}
    for _, least, each in timed:
        kind = (each.ranks.tp, each.ranks.pp, each.schedule, each.reshard_after_forward)
        if kind in found:
            continue
        # What ways need beyond the least does not depend on the number of shards.
        shape = (*kind, each.batch, min(each.microbatches, 3), each.ranks.dp_shard > 1)
        peak = least + more.get(shape, 0.0)
        if peak <= usable:
            candidate = plan(each, machine, tracer)
            peak = candidate.memory.peak
            more[shape] = peak - least
            if candidate.fits:
                found[kind] = candidate
        smallest = min(smallest, peak)
        if len(found) == count:
            break
    if not found:
        raise ValueError(
            f"nothing fits: of {len(timed)} ways the smallest needs {smallest / GIB:.1f} GiB of "
            f"{usable / GIB:.1f}; use more GPUs, shorter sequences, "
            f"{'' if job.grad_sync == 'every' else 'reductions in every microbatch, '}or FP8 weights"
        )
    return sorted(found.values(), key=lambda each: each.time.seconds)


class _Estimate:
    """One way, from the trace of three layers."""

    def __init__(self, job: Job, config: LlamaConfig, tracer: Tracer) -> None:
        ranks = replace(REFERENCE, tp=job.ranks.tp, sequence_parallel=job.ranks.sequence_parallel)
        few = replace(job, model=replace(config, layers=3), ranks=ranks, microbatches=3)
        few = replace(few, schedule="1f1b", reshard_after_forward=True)
        one, two = (tracer.stages(replace(few, batch=batch))[0][0].trace for batch in (1, 2))
        # All work is linear in the tokens.
        self._job, self._trace = job, one
        self._root, self._layer = (
            unit._replace(loads=_linear(unit.loads, twice.loads, job.batch - 1))
            for unit, twice in ((one.units[0], two.units[0]), (one.units[2], two.units[2]))
        )
        saved, of_two = (_kept(each.units[2]) for each in (one, two))
        self._saved = saved + (job.batch - 1) * (of_two - saved)

    def seconds(self, machine: Machine) -> float:
        """Seconds of a step; the head and the embedding are on the last stage."""
        _, times = rounds_of(self._job)
        kinds = {(len(part.layers), part.has_head) for parts in self._job.parts for part in parts}
        traces = {kind: self._stage(*kind) for kind in kinds}
        ranks = [
            [Stage(part, traces[len(part.layers), part.has_head], times) for part in parts]
            for parts in self._job.parts
        ]
        return step_time(self._job, ranks, machine).seconds

    def _stage(self, layers: int, has_head: bool) -> Trace:
        none = UnitTrace("", 0, (), {}, {})
        units = (self._root if has_head else none, *[self._layer] * layers)
        parameters = sum(unit.parameters for unit in units)
        whole = sum(unit.parameters for unit in self._trace.units)
        share = parameters / whole * REFERENCE.dp_shard / self._job.ranks.dp_shard
        return replace(self._trace, units=units, optimizer=self._trace.optimizer.times(share))

    def memory(self) -> float:
        """Bytes that the first pipeline rank needs at least."""
        job, parts = self._job, self._job.parts[0]
        layers = [len(part.layers) for part in parts]
        flying = sum(n * count for n, count in zip(layers, in_flight(job, 0), strict=True))
        sizes = self._layer.sizes
        shards = sum(
            size.nbytes * (1 + len(MOMENTS) if buffer == "master shard" else 1)
            for group in sizes
            for buffer, size in group.items()
            if buffer in ("master shard", "compute shard")
        )
        numel = sum(group["main_grad"].numel for group in sizes) if job.microbatches > 1 else 0
        gradients: float = numel * job.dtypes.accumulate.itemsize
        of_layer = shards * REFERENCE.dp_shard / job.ranks.dp_shard
        if job.grad_sync == "every":
            # Between microbatches there is the sum on the shard.
            gradients /= job.ranks.dp_shard
        return sum(layers) * (of_layer + gradients) + flying * self._saved


def _kept(unit: UnitTrace) -> int:
    """Bytes that a unit keeps until its backward: those that are there in the head's backward."""
    return max(held for at, held in unit.saved.items() if (at.phase, at.unit) == (BACKWARD, ""))


def _linear(one: Mapping[K, Load], two: Mapping[K, Load], more: int) -> dict[K, Load]:
    return {key: total([load, two[key].times(more), load.times(-more)]) for key, load in one.items()}


def _jobs(job: Job, config: LlamaConfig, machine: Machine, global_batch: int) -> Iterator[Job]:
    """All jobs that pass the checks of `Job`."""
    for way in _ways(config, job.ranks.world, machine):
        for batch in BATCHES:
            microbatches, rest = divmod(global_batch, way.ranks.dp * batch)
            if rest or not microbatches:
                continue
            try:
                yield replace(job, **way._asdict(), batch=batch, microbatches=microbatches)
            except ValueError:
                continue


class Way(NamedTuple):
    """One way to spread a job; the fields are those of `Job`."""

    ranks: Parallelism
    schedule: ScheduleName
    reshard_after_forward: bool


def _ways(config: LlamaConfig, gpus: int, machine: Machine) -> Iterator[Way]:
    """All ways considered.

    Tensor-parallel ranks are in one host and use sequence parallelism.  Shards are over all data-parallel
    ranks, or a power of two of them.  Pipelines have one or two stages per rank.
    """
    for tp in _powers_of_two(min(machine.gpus_per_host, config.kv_heads)):
        if gpus % tp or config.vocab % tp or config.seq % tp or config.ffn % tp or config.kv_heads % tp:
            continue
        for pp in (size for size in range(1, min(config.layers, gpus // tp) + 1) if gpus // tp % size == 0):
            schedules: list[ScheduleName] = ["1f1b"]
            if 1 < pp <= config.layers // 2:
                schedules.append("interleaved")
            dp = gpus // tp // pp
            for shards in {dp, *(size for size in _powers_of_two(dp) if dp % size == 0)}:
                ranks = Parallelism(pp, dp // shards, shards, tp, sequence_parallel=True)
                for schedule in schedules:
                    for frees in (True, False) if shards > 1 else (True,):
                        yield Way(ranks, schedule, frees)


def _powers_of_two(limit: int) -> Iterator[int]:
    return (1 << power for power in range(limit.bit_length()))
