"""The bytes that a rank sends in a step, as the byte ledger and a count of all collectives have them.

In:   a `Job`.
Out:  `Sent` of each pipeline rank.
Next: `time.py` converts it to time.

Not counted: amaxes and scales of FP8, a few bytes per weight, and the gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from flatfsdp.contract.placement import Placement
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.plan.activations import FP32_BYTES, Sizes, between_stages
from flatfsdp.plan.job import Job
from flatfsdp.plan.memory import group_sizes
from flatfsdp.plan.parts import Layouts, Part, layouts_of, parts_of


class Sent(NamedTuple):
    """Bytes that one rank sends in a step.

    Attributes:
        gather, reduce, all_reduce, tp_all_reduce: parameters and gradients, as in `ByteLedger`.
        tp_layers: activations and their gradients, inside layers, embedding and head.
        pp: activations and their gradients, between pipeline stages.
    """

    gather: int = 0
    reduce: int = 0
    all_reduce: int = 0
    tp_all_reduce: int = 0
    tp_layers: int = 0
    pp: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(self)


def sent_by_rank(job: Job) -> list[Sent]:
    """Bytes that one rank of each pipeline rank sends.

    Raises:
        ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8.
    """
    layouts = layouts_of(job)
    return [_sum(sent_by_stage(part, layouts, job) for part in parts) for parts in parts_of(job)]


def sent_by_stage(part: Part, layouts: Layouts, job: Job) -> Sent:
    """Bytes that one rank of a pipeline stage sends."""
    root, *layers = layouts.units(part)
    times = gathers(job)
    of_units = [of_unit(root, job, times.root), *(of_unit(layer, job, times.layer) for layer in layers)]
    boundaries = (not part.has_embedding) + (not part.has_head)
    activations = Sent(
        tp_layers=job.microbatches * sum(of_stage(part, job)),
        pp=boundaries * job.microbatches * between_stages(job) if job.ranks.pp > 1 else 0,
    )
    return _sum([*of_units, activations])


class Gathers(NamedTuple):
    """The number of gathers of a unit in a step."""

    root: int
    layer: int


def gathers(job: Job) -> Gathers:
    """Number of gathers of each unit in a step.

    Once; or, if parameters are freed after use, in each forward and backward, except for the root's, which
    stay in between.
    """
    if not job.reshard_after_forward:
        return Gathers(1, 1)
    return Gathers(job.microbatches, 2 * job.microbatches)


def of_unit(groups: Sequence[FlatLayout], job: Job, times: int) -> Sent:
    """Bytes sent for the parameters and gradients of one unit.

    Args:
        groups: layouts of its flat groups.
        job: the job.
        times: number of gathers.
    """
    ranks, precision = job.ranks, job.precision
    found = Sent()
    for layout in groups:
        sizes = group_sizes(layout, job)
        gathered = share(sizes["flat buffer"].nbytes, ranks.dp_shard) if "flat buffer" in sizes else 0
        partial = layout.placement is Placement.PARTIAL and ranks.tp > 1
        reduced = sizes["reduced gradient"].numel * precision.reduce.itemsize
        summed = (
            sizes["reduced gradient"].numel * torch.promote_types(precision.reduce, torch.float32).itemsize
        )
        own = Sent(
            gather=times * gathered,
            reduce=share(sizes["main_grad"].numel * precision.reduce.itemsize, ranks.dp_shard),
            all_reduce=2 * share(reduced, ranks.dp_replicate),
            tp_all_reduce=2 * share(summed, ranks.tp) if partial else 0,
        )
        found = _sum([found, own])
    return found


def share(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of `nbytes`."""
    return nbytes * (ranks - 1) // ranks


class Exchanged(NamedTuple):
    """Bytes that a tensor-parallel rank sends in one microbatch."""

    embedding: int
    layers: int
    head: int


def of_stage(part: Part, job: Job) -> Exchanged:
    """Bytes sent for the activations of one microbatch and their gradients."""
    if job.ranks.tp == 1:
        return Exchanged(0, 0, 0)
    return Exchanged(
        part.has_embedding * _embedding(job),
        part.layers * exchanged_by_layer(job),
        part.has_head * _head(job),
    )


def exchanged_by_layer(job: Job) -> int:
    """Bytes that attention and MLP send for their [tokens, h] matrices (`Exchange`).

    Each of the two sends:

    without sequence parallelism   y summed; dx summed                                    2 all-reduces of
    c with                           y, dx summed and scattered                             2 of c
                                   x gathered in forward and backward; dy gathered        3 of p
    """
    z = Sizes.of(job)
    matrix = z.tokens * z.h
    if z.s == 1:
        return 2 * 2 * 2 * share(matrix * z.c, z.t)
    return 2 * (2 * share(matrix * z.c, z.t) + 3 * share(matrix * z.p, z.t))


def exchanges_of_layer(job: Job) -> int:
    """The number of these collectives."""
    if job.ranks.tp == 1:
        return 0
    return 2 * (2 + 3) if job.ranks.sequence_parallel else 2 * 2


def _embedding(job: Job) -> int:
    """Rows are summed; with sequence parallelism they are scattered, and their gradient is gathered."""
    z = Sizes.of(job)
    return 2 * share(z.tokens * z.h * z.c, z.t)


def _head(job: Job) -> int:
    """Bytes that tensor-parallel ranks send for the head.

    An all-reduce of dx; with sequence parallelism instead a reduce-scatter of dx, and all-gathers of x in
    forward and backward.  Three statistics of the logits per token are summed as well.
    """
    z = Sizes.of(job)
    times = 2 if z.s == 1 else 3
    return times * share(z.tokens * z.h * z.c, z.t) + 2 * share(3 * z.tokens * FP32_BYTES, z.t)


def _sum(all_sent: Iterable[Sent]) -> Sent:
    return Sent(*map(sum, zip(Sent(), *all_sent, strict=True)))


def named(sent: Sent) -> Iterator[tuple[str, int]]:
    """The lines of a table."""
    names = {
        "gather": "parameters gathered",
        "reduce": "gradients reduced over shards",
        "all_reduce": "gradients reduced over replicas",
        "tp_all_reduce": "gradients summed over tensor-parallel ranks",
        "tp_layers": "activations among tensor-parallel ranks",
        "pp": "activations between pipeline stages",
    }
    return ((names[field], getattr(sent, field)) for field in Sent._fields)
