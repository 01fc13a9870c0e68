"""The memory of one rank, between steps and at the peak of a step.

In:   a `Job`.
Out:  a `MemoryPlan` of the pipeline rank that needs most.
Next: `cli/plan.py` prints it; `search.py` compares plans.

Buffers of parameters and gradients are those of `FlatFSDP.memory_report`, by the same code, from layouts
instead of tensors.  Activations are added, and the peak is the largest of these moments:

    the head's backward            most microbatches in flight, logits; gradients of earlier microbatches
    the last layer's backward      the same without these logits, and what a layer's backward needs
    the second backward            if all of a step's microbatches were in flight before the first one
    the end of the last backward   activations are freed, gradients of all but a few units are reduced
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flatfsdp.engine.step.reduce import MAX_IN_FLIGHT
from flatfsdp.engine.storage.fp8_weights import FP8_DTYPE
from flatfsdp.engine.whole.memory import (
    ALWAYS,
    GroupSizes,
    MemoryReport,
    Size,
    largest_window,
    report_of,
    units_ahead,
)
from flatfsdp.flat.layout import FlatLayout, Role
from flatfsdp.optim.adamw import MOMENTS
from flatfsdp.plan import activations
from flatfsdp.plan.job import Job
from flatfsdp.plan.parts import Layouts, Part, layouts_of, parts_of
from flatfsdp.plan.schedule import in_flight


class Line(NamedTuple):
    """Memory of one kind.

    Attributes:
        name: the kind.
        nbytes: bytes.
        note: what determines it.
    """

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank at the peak of a step, in bytes.

    Attributes:
        static: lines that also exist between steps, without gradients.
        passing: all other lines.
        moment: when the peak is.
    """

    static: tuple[Line, ...]
    passing: tuple[Line, ...]
    moment: str

    @property
    def between_steps(self) -> int:
        """Bytes between steps."""
        return sum(line.nbytes for line in self.static)

    @property
    def peak(self) -> int:
        """Peak of bytes from PyTorch's allocator, without CUDA's and NCCL's own, and without gaps."""
        return self.between_steps + sum(line.nbytes for line in self.passing)


@dataclass(frozen=True)
class MemoryPlan(StepMemory):
    """Memory of the rank of a Llama's pipeline that needs most.

    Attributes:
        pp_rank: the pipeline rank.
    """

    pp_rank: int


def group_sizes(layout: FlatLayout, job: Job) -> GroupSizes:
    """The sizes that `memory_report` finds in the group of this layout."""
    precision, shards = job.precision, job.ranks.dp_shard
    placement = None if job.ranks.tp == 1 else layout.placement
    shard, padded = layout.shard_numel(shards), layout.padded_numel(shards)
    is_fp8 = layout.role is Role.FP8 and job.stores_fp8
    stored = FP8_DTYPE if is_fp8 else precision.compute

    def size(numel: int, dtype: torch.dtype) -> Size:
        return Size(numel, dtype, placement)

    sizes = {
        "master shard": size(shard, precision.param),
        "main_grad": size(padded, precision.accumulate),
        "reduced gradient": size(shard, precision.grad or precision.param),
    }
    if stored != precision.param:
        sizes["compute shard"] = size(shard, stored)
    if shards > 1:
        sizes["flat buffer"] = size(padded, stored)
    if is_fp8:
        sizes["transposed weights"] = size(padded, stored)
    return sizes


def stage_sizes(part: Part, layouts: Layouts, job: Job) -> list[list[GroupSizes]]:
    """The sizes of each unit of a stage, the root's first."""
    root, *layers = layouts.units(part)
    of_root, of_layer = ([group_sizes(layout, job) for layout in unit] for unit in (root, layers[0]))
    return [of_root, *[of_layer] * len(layers)]


def stage_report(units: Sequence[Sequence[GroupSizes]], job: Job) -> MemoryReport:
    """The `memory_report` of a stage after a step of AdamW, except for its counters of steps."""
    state = [sizes["master shard"] for unit in units for sizes in unit for _ in MOMENTS]
    return report_of(units, state, _ahead(job))


def _ahead(job: Job) -> int | None:
    return units_ahead(job.prefetch) if job.reshard_after_forward else None


def memory_plan(job: Job) -> MemoryPlan:
    """Memory of the rank that needs most.

    Raises:
        ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8.
    """
    return fullest(job, parts_of(job), layouts_of(job))


def fullest(job: Job, parts: Sequence[Sequence[Part]], layouts: Layouts) -> MemoryPlan:
    """Memory of the rank that needs most, given the stages of each pipeline rank."""
    # Among ranks with equal stages, the first has most microbatches in flight.
    first = {tuple(of_rank): rank for rank, of_rank in reversed(list(enumerate(parts)))}
    plans = (_of_rank(job, rank, of_rank, layouts) for of_rank, rank in first.items())
    return max(plans, key=lambda plan: plan.peak)


def _of_rank(job: Job, rank: int, parts: Sequence[Part], layouts: Layouts) -> MemoryPlan:
    stages = [stage_sizes(part, layouts, job) for part in parts]
    held = _Rank(job, parts, stages, in_flight(job, rank))
    moments = {
        "the head's backward": held.at_the_head(),
        "the last layer's backward": held.at_the_last_layer(),
        "the second backward": held.at_the_second_backward(),
        "the end of the last backward": held.at_the_end(),
    }
    moment, lines = max(moments.items(), key=lambda item: sum(line.nbytes for line in item[1]))
    static = (*_reported([stage_report(stage, job) for stage in stages]), held.stage_buffers())
    passing = (*held.gathered(), *lines)
    return MemoryPlan(_there(static), _there(passing), moment, rank)


def _there(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.nbytes)


def _reported(reports: Sequence[MemoryReport]) -> tuple[Line, ...]:
    """One line per buffer and dtype, over all stages."""
    found: dict[str, int] = {}
    for row in (row for report in reports for row in report.rows if row.lives == ALWAYS):
        name = f"{row.buffer}, {str(row.dtype).removeprefix('torch.')}"
        found[name] = found.get(name, 0) + row.total
    return tuple(Line(name, nbytes) for name, nbytes in found.items())


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank at moments of a step.

    Attributes:
        stages: the sizes of all groups, by stage and unit, the root's first.
        flying: largest number of microbatches between forward and backward, by stage.
    """

    job: Job
    parts: Sequence[Part]
    stages: Sequence[Sequence[Sequence[GroupSizes]]]
    flying: Sequence[int]

    # ---- parameters and gradients -----------------------------------------------------------------------

    def gathered(self) -> list[Line]:
        """Lines of gathered parameters."""
        ahead = _ahead(self.job)
        live = "all units, until the last microbatch" if ahead is None else f"the root and {1 + ahead} units"
        return [
            Line("flat buffer", self._unsharded("flat buffer", ahead), f"gathered: {live}"),
            Line("transposed weights", self._unsharded("transposed weights", ahead), "FP8, for the backward"),
        ]

    def _unsharded(self, buffer: str, ahead: int | None) -> int:
        """Bytes of roots between forward and backward, and of units of the stage that computes."""
        sizes = [_by_unit(stage, buffer) for stage in self.stages]
        if ahead is None:
            return sum(map(sum, sizes))
        return sum(each[0] for each in sizes) + max(largest_window(each[1:], ahead) for each in sizes)

    def _main_grad(self, layers: int, *, embedding: bool) -> Line:
        """The gradients of roots, and of `layers` layers of the stage that computes.

        Args:
            layers: number of layers.
            embedding: whether roots without the head already have gradients.
        """
        sizes = [_by_unit(stage, "main_grad") for stage in self.stages]
        pairs = zip(self.parts, sizes, strict=True)
        roots = sum(each[0] for part, each in pairs if embedding or part.has_head)
        largest = max(sum(sorted(each[1:])[-layers:]) if layers else 0 for each in sizes)
        return Line("main_grad", roots + largest, "unsharded, until it is reduced")

    def _all_main_grad(self) -> Line:
        total = sum(sum(_by_unit(stage, "main_grad")) for stage in self.stages)
        return Line("main_grad", total, f"unsharded, added up over {self.job.microbatches} microbatches")

    # ---- moments ----------------------------------------------------------------------------------------

    @property
    def _has_all_in_flight(self) -> bool:
        """Whether no forward of the step follows its first backward."""
        return sum(self.flying) == len(self.parts) * self.job.microbatches

    def _gradients(self, layers: int) -> Line:
        """The gradients with most microbatches in flight, when the backward of `layers` layers has begun."""
        if self._has_all_in_flight:
            return self._main_grad(layers, embedding=False)
        return self._all_main_grad()

    def at_the_head(self) -> list[Line]:
        """Lines at the head's backward."""
        beside = activations.backward_of_head(self.job) if self.parts[-1].has_head else 0
        head = Line("backward of the head", beside, "what it needs beside")
        return [self._gradients(layers=0), *self._saved(self.flying, spent_logits=0), head]

    def at_the_last_layer(self) -> list[Line]:
        """Lines at the last layer's backward."""
        return [self._gradients(layers=1), *self._saved(self.flying, spent_logits=1), self._backward()]

    def at_the_second_backward(self) -> list[Line]:
        """Lines at the second backward; none unless all microbatches were in flight before the first one."""
        if not self._has_all_in_flight or self.job.microbatches == 1:
            return []
        # The last stage's backward comes first.
        flying = [*self.flying[:-1], self.flying[-1] - 1]
        return [self._all_main_grad(), *self._saved(flying, spent_logits=1), self._backward()]

    def at_the_end(self) -> list[Line]:
        """Lines at the end: one layer computes while others are reduced.

        Without shards, gradients stay in place.
        """
        reduced = sum(sum(_by_unit(stage, "reduced gradient")) for stage in self.stages)
        return [
            *([self._main_grad(1 + MAX_IN_FLIGHT, embedding=True)] if self.job.ranks.dp_shard > 1 else []),
            Line("reduced gradient", reduced, "until zero_grad"),
            Line("activations", activations.saved_by_layer(self.job), "one layer"),
            self._backward(),
        ]

    def _backward(self) -> Line:
        return Line("backward of a layer", activations.backward_of_layer(self.job), "what it needs beside")

    def _saved(self, flying: Sequence[int], *, spent_logits: int) -> list[Line]:
        """Lines of saved activations and logits.

        Args:
            flying: microbatches in flight, by stage.
            spent_logits: how many of them no longer have logits.
        """
        layer, head = activations.saved_by_layer(self.job), activations.saved_by_head(self.job)
        between = activations.between_stages(self.job) if self.job.ranks.pp > 1 else 0
        total = sum(
            count * (part.layers * layer + part.has_head * head + (not part.has_head) * between)
            for part, count in zip(self.parts, flying, strict=True)
        )
        heads = sum(n for part, n in zip(self.parts, flying, strict=True) if part.has_head)
        layers = "+".join(str(part.layers) for part in self.parts)
        counts = "+".join(map(str, flying))
        return [
            Line("activations", total, f"{layers} layers x {counts} microbatches in flight"),
            Line("logits", max(0, heads - spent_logits) * activations.logits(self.job)),
        ]

    def stage_buffers(self) -> Line:
        """Bytes of torch's receive buffers for activations and gradients, one for each microbatch."""
        ends = sum((not part.has_embedding) + (not part.has_head) for part in self.parts)
        count = self.job.microbatches if self.job.ranks.pp > 1 else 0
        nbytes = ends * count * activations.between_stages(self.job)
        return Line("pipeline buffers", nbytes, f"received, {self.job.microbatches} microbatches")


def _by_unit(units: Sequence[Sequence[GroupSizes]], buffer: str) -> list[int]:
    return [sum(sizes[buffer].nbytes for sizes in unit if buffer in sizes) for unit in units]
