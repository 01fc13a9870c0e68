"""What to change in a job that does not fit: each change is planned, and offered if it helps.

In:   a `Plan` that does not fit.
Out:  `Advice`, the lowest peak first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from flatfsdp.plan.job import Job, Model
from flatfsdp.plan.plan import Plan, plan
from flatfsdp.plan.stages import Tracer

WORTH = 0.95
"""A change has to leave no more than this share of the peak."""
MOST_TIMES = 64
"""As many GPUs more, at most."""


class Advice(NamedTuple):
    """Changes of a job in words, and its plan with them."""

    changes: tuple[str, ...]
    plan: Plan


Change = Callable[[Job], Iterator[tuple[str, Job]]]
"""A kind of change: yields it in words, with the job; several, the smallest first, if it has a size."""


def advise(found: Plan, tracer: Tracer | None = None) -> list[Advice]:
    """Plans what would lower the peak of a plan that does not fit; what makes it fit comes first.

    Single changes are offered, and, if none of the settings is enough alone, the fewest of them together that
    are, or with other ranks besides.

    Args:
        tracer: has what earlier plans for the same machine have traced.
    """
    if found.fits:
        return []
    tracer = tracer or Tracer(found.machine)
    settings = _helpful(Advice((), found), SETTINGS, tracer)
    singles = [*settings, *_helpful(Advice((), found), RANKS, tracer)]
    best = settings
    while best and not best[0].plan.fits:
        # With the best change made, the next one.
        best = _helpful(best[0], SETTINGS, tracer) or _helpful(best[0], RANKS, tracer)
    together = best[:1] if best and best[0] not in singles else []
    return sorted([*singles, *together], key=lambda each: (not each.plan.fits, each.plan.memory.peak))


def _helpful(before: Advice, changes: Sequence[Change], tracer: Tracer) -> list[Advice]:
    """The changes that help, each of the least size with which it fits; the best one first."""
    offered = []
    for change in changes:
        best: Advice | None = None
        for words, job in change(before.plan.job):
            try:
                after = plan(job, before.plan.machine, tracer)
            except ValueError:
                # Sizes that these ranks cannot share.
                continue
            if after.memory.peak <= WORTH * (best or before).plan.memory.peak:
                best = Advice((*before.changes, words), after)
            if after.fits:
                break
        if best is not None:
            offered.append(best)
    return sorted(offered, key=lambda each: (not each.plan.fits, each.plan.memory.peak))


def _reduce_often(job: Job) -> Iterator[tuple[str, Job]]:
    if job.grad_sync == "last" and job.microbatches > 1:
        yield 'reduce gradients in every microbatch: grad_sync="every"', replace(job, grad_sync="every")


def _reshard(job: Job) -> Iterator[tuple[str, Job]]:
    if not job.reshard_after_forward and job.ranks.dp_shard > 1:
        yield "reshard after each forward: ZeRO-3", replace(job, reshard_after_forward=True)


def _checkpoint(job: Job) -> Iterator[tuple[str, Job]]:
    if not job.checkpoint_layers:
        yield "activation checkpointing of each layer", replace(job, checkpoint_layers=True)


def _fewer_sequences(job: Job) -> Iterator[tuple[str, Job]]:
    if job.batch > 1 and not isinstance(job.model, Model):
        count = job.batch * job.microbatches
        yield f"one sequence in each of {count} microbatches", replace(job, batch=1, microbatches=count)


def _share(job: Job) -> Iterator[tuple[str, Job]]:
    if job.ranks.dp_replicate > 1:
        ranks = replace(job.ranks, dp_replicate=1, dp_shard=job.ranks.dp)
        yield f"shard over all {ranks.dp} data-parallel ranks", replace(job, ranks=ranks)


def _split_layers(job: Job) -> Iterator[tuple[str, Job]]:
    for times in (2, 4, 8):
        tp = job.ranks.tp * times
        if not isinstance(job.model, Model) and job.ranks.dp_shard % times == 0 and tp <= 8:
            shards = job.ranks.dp_shard // times
            ranks = replace(job.ranks, tp=tp, dp_shard=shards, sequence_parallel=True)
            count = job.microbatches * times
            words = f"{tp} tensor-parallel ranks, with the sequence, and {count} microbatches"
            yield words, replace(job, ranks=ranks, microbatches=count)


def _more_gpus(job: Job) -> Iterator[tuple[str, Job]]:
    times = 2
    while times <= MOST_TIMES:
        ranks = replace(job.ranks, dp_shard=job.ranks.dp_shard * times)
        yield f"{ranks.world} GPUs", replace(job, ranks=ranks)
        times *= 2


SETTINGS: tuple[Change, ...] = (_reduce_often, _reshard, _checkpoint, _fewer_sequences)
RANKS: tuple[Change, ...] = (_share, _split_layers, _more_gpus)
