"""`verify_world`: checks that a model trains to the same bits on any number of ranks (`comm/lanes.py`).

In:   a job, and several ways to spread it over the first ranks of those that there are.
Out:  a `Parity` with one row for each way but the first, which all others are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.ranks import Ranks
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.evidence import KINDS, GradientRecorder, NamedTensors, evidence, first_difference, joined
from flatfsdp.parity.loop import OnStep, RunSummary, ignore, train
from flatfsdp.parity.switches import Sharding
from flatfsdp.parity.verify import Comparison

LEAST_LANES_OF_SELF_TEST = 3
"""Two numbers have one sum, whichever comes first."""


@dataclass(frozen=True)
class Spread:
    """One way to spread a model over ranks.

    Attributes:
        name: in words.
        sharding: how it is sharded and computed there.
        ranks: number of ranks; the first of all take part.
        replicas: number of groups of ranks that each have the whole model.
    """

    name: str
    sharding: Sharding
    ranks: int
    replicas: int = 1


def verify_world(
    job: ModelJob,
    lanes: Lanes,
    spreads: Sequence[Spread],
    rank: Rank,
    *,
    self_test: bool = False,
    on_step: OnStep = ignore,
    about: dict[str, Any] | None = None,
) -> Iterator[Comparison]:
    """Trains a model in several ways, and compares each with the first one.

    Collective over all ranks; all get the same results.  Whole losses, reduced gradients of every step,
    parameters, buffers and optimizer state are compared on rank 0, in CPU memory.

    Args:
        job: the model, its data and settings; `microbatches` counts those of a step on all ranks together,
            whose batches are those that `job.batches(0, 1)` yields.
        lanes: the lanes of a step.
        spreads: the ways.
        rank: this rank, of as many as the largest way needs.
        self_test: let two lanes change places in all ways but the first, which must be found.
        on_step: called after every step on rank 0.
        about: facts about all rows.

    Yields:
        One row for each way after the first.

    Raises:
        ValueError: if the lanes cannot be spread in one of the ways; for a self test with fewer than three.
    """
    if self_test and lanes.number < LEAST_LANES_OF_SELF_TEST:
        raise ValueError(
            f"a self test exchanges the second lane and the third, and there are {lanes.number}; take "
            f"{LEAST_LANES_OF_SELF_TEST} lanes or more"
        )
    # Not the first two: their sum has the same bits in either order.
    swaps = (1, 2) if self_test else None
    meshes: dict[tuple[int, int], tuple[DeviceMesh, dist.ProcessGroup]] = {}
    first: _Found | None = None
    for index, spread in enumerate(spreads):
        shape = spread.replicas, spread.ranks // spread.replicas
        if shape not in meshes:
            # Made by all ranks, also those that take no part.
            ranks = torch.arange(spread.ranks).view(shape)
            mesh = DeviceMesh(rank.device.type, ranks, mesh_dim_names=("replicate", "shard"))
            meshes[shape] = mesh, dist.new_group(range(spread.ranks))
        mesh, group = meshes[shape]
        options = {**job.options, "lanes": lanes, "mesh": mesh}
        changed = replace(job, options=options, swaps=swaps if index else None)
        found = _found(changed, spread, replace(rank, world=spread.ranks, group=group), on_step)
        row = None
        if first is None:
            first = found
        elif found is not None:
            notes = {kind: first_difference(first.evidence[kind], found.evidence[kind]) for kind in KINDS}
            differences = {kind: [] if note is None else [note] for kind, note in notes.items()}
            ends = spreads[0].name, spread.name
            same = not any(differences.values()) if spreads[0].ranks == 1 else None
            row = Comparison("world", ends, first.summary, found.summary, differences, about or {}, same)
        if index:
            yield broadcast_object(row, [Ranks.of(dist.group.WORLD)], rank.device)


class _Found(NamedTuple):
    """What a run has left behind, of all ranks that took part."""

    summary: RunSummary
    evidence: dict[str, NamedTensors]


def _found(job: ModelJob, spread: Spread, rank: Rank, on_step: OnStep) -> _Found | None:
    """Trains in one way; returns what it has left behind on the first rank, None elsewhere."""
    mine = None
    if rank.index < spread.ranks:
        recorder = GradientRecorder()
        trained = train(job.trainee, spread.sharding, rank, on_step, recorder)
        mine = trained.summary, evidence(trained, recorder.gradients)
    everyones: list[Any] | None = [None] * dist.get_world_size() if rank.index == 0 else None
    dist.gather_object(mine, everyones)
    if everyones is None:
        return None
    of_ranks = everyones[: spread.ranks]
    whole = {kind: joined([evidence_of_rank[kind] for _, evidence_of_rank in of_ranks]) for kind in KINDS}
    return _Found(of_ranks[0][0], whole)
