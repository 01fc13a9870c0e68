"""`search`: the fastest ways to spread a model over a number of GPUs, among those that fit.

In:   a `Job` whose ranks are to be found, a `Machine`, and the number of sequences in a step.
Out:  `Candidate`s, the fastest first.
Next: `cli/plan.py` prints them.

Times are computed for all ways; memory only from the fastest on, until enough fit.  Of ways that differ only
in the number of shards or the microbatch, the fastest one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.engine.whole.memory import GIB
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import MemoryPlan, memory_plan
from flatfsdp.plan.time import TimePlan, time_plan

BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """One way to run a job, with its time and memory."""

    job: Job
    time: TimePlan
    memory: MemoryPlan


def search(job: Job, machine: Machine, global_batch: int, count: int) -> list[Candidate]:
    """Finds the fastest ways to run a job, the fastest first.

    Args:
        job: the job; its ranks (except their number), schedule, resharding, batch and microbatches are
            replaced.
        machine: the machine.
        global_batch: sequences in one step of all ranks.
        count: largest number of candidates.

    Raises:
        ValueError: if the ranks cannot share this many sequences in any way, no way has sizes that suit FP8
            GEMMs, or nothing fits.
    """
    timed: list[tuple[TimePlan, Job]] = []
    refused: list[ValueError] = []
    for each in _jobs(job, machine, global_batch):
        try:
            timed.append((time_plan(each, machine), each))
        except ValueError as error:
            # Sizes that do not suit FP8 GEMMs; other ways may have other sizes.
            refused.append(error)
    if refused and not timed:
        raise refused[0]
    if not timed:
        raise ValueError(
            f"{job.ranks.world} GPUs cannot share {global_batch} sequences, {job.model.layers} layers and "
            f"{job.model.kv_heads} groups of heads equally; choose another global batch, such as "
            f"{job.ranks.world}, or number of GPUs"
        )
    timed.sort(key=lambda found: found[0].seconds)
    found: dict[tuple[object, ...], Candidate] = {}
    smallest = math.inf
    for time, each in timed:
        kind = (each.ranks.tp, each.ranks.pp, each.schedule, each.reshard_after_forward)
        if kind in found:
            continue
        memory = memory_plan(each)
        smallest = min(smallest, memory.peak)
        if memory.peak <= machine.usable_memory():
            found[kind] = Candidate(each, time, memory)
        if len(found) == count:
            break
    if not found:
        raise ValueError(
            f"nothing fits: of {len(timed)} ways the smallest needs {smallest / GIB:.1f} GiB of "
            f"{machine.usable_memory() / GIB:.1f}; use more GPUs, shorter sequences, or FP8 weights"
        )
    return list(found.values())


def _jobs(job: Job, machine: Machine, global_batch: int) -> Iterator[Job]:
    """All jobs that pass the checks of `Job`."""
    for way in _ways(job, machine):
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


def _ways(job: Job, machine: Machine) -> Iterator[Way]:
    """All ways considered.

    Tensor-parallel ranks are in one host and use sequence parallelism.  Shards are over all data-parallel
    ranks, or a power of two of them.  Pipelines have one or two stages per rank.
    """
    config, gpus = job.model, job.ranks.world
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
