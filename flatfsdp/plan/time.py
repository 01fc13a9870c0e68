"""The time of a step: computation, exposed communication, and the pipeline's bubble.

In:   the traced `Stage`s of all pipeline ranks, and a `Machine`.
Out:  a `StepTime` of the slowest pipeline rank; `UnitPlan`s of a stage.
Next: `plan.py` puts it beside the memory; `search.py` compares times.

Overlap follows the engine:

    gathers of a unit        run beside the unit before; exposed are any excess, the root's, and the first
                             in a forward
    reductions of a unit     run beside later units in a backward that reduces, the last one or every one;
                             exposed are the root's and the last, unless they run beside the next forward
    tensor-parallel ranks    run beside GEMMs, by a measured share
    pipeline stages          no overlap: torch's schedules wait for what they receive

Collectives take memory bandwidth and multiprocessors from concurrent GEMMs.  The plan counts what reductions
in earlier microbatches take, by a measured share, because there are many of them.  It ignores the rest: with
much communication, planned steps are 6 to 9 % too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from flatfsdp.contract.placement import Placement
from flatfsdp.engine.step.reduce import SETTLED_BEFORE
from flatfsdp.engine.whole.memory import GroupSizes
from flatfsdp.models import flops_per_token
from flatfsdp.plan.job import Job, Model
from flatfsdp.plan.links import Groups
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.stages import Stage
from flatfsdp.plan.trace.places import BACKWARD, FORWARD
from flatfsdp.plan.trace.step import UnitTrace
from flatfsdp.plan.trace.work import total

EXCHANGE, PARAMETERS = "waiting for tensor-parallel ranks", "waiting for parameters and gradients"
STAGES, LAST_REDUCTION = "waiting for other stages", "waiting for the last reduction"
HOST = "waiting for the host"
BARE = (EXCHANGE, PARAMETERS, STAGES, LAST_REDUCTION)
"""Lines of exposed communication."""


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


class UnitPlan(NamedTuple):
    """Memory and time of one unit; bytes and seconds of one rank.

    Attributes:
        name: empty for the root, which has all that is in no other unit.
        parameters: elements, of all ranks together.
        between_steps: bytes of its shards; not of the optimizer.
        gathered: bytes of its parameters while it computes, with transposed FP8 weights.
        saved: bytes that its forwards keep for backwards, at the fullest moment of the step.
        forward, backward: seconds of a GPU in one microbatch.
        gather, reduce: seconds of one gather of its parameters, and of the reduction of its gradients.
        reduce_early: seconds of the reduction in each backward before the last, over shards alone; 0 if there
            is none.
    """

    name: str
    parameters: int
    between_steps: int
    gathered: int
    saved: int
    forward: float
    backward: float
    gather: float
    reduce: float
    reduce_early: float


@dataclass(frozen=True)
class StepTime:
    """The time of one step, in seconds.

    Attributes:
        lines: seconds by kind, which add up to the step.
        communication: all communication of the rank in a step, hidden or not.
        flops: operations of one step on one GPU.
        tokens: of all ranks in a step; None if they are not known.
        pp_rank: the slowest pipeline rank, whose lines and communication these are.
    """

    lines: dict[str, float]
    communication: float
    flops: float
    tokens: int | None
    pp_rank: int

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.lines.values())

    @property
    def hidden_share(self) -> float | None:
        """The share of communication that computation hides; None if there is none."""
        bare = sum(self.lines.get(name, 0.0) for name in BARE)
        return 1 - bare / self.communication if self.communication else None

    @property
    def flops_per_second(self) -> float:
        """The speed of one GPU."""
        return self.flops / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of all GPUs."""
        return None if self.tokens is None else self.tokens / self.seconds


def sent_by(job: Job, stages: Sequence[Stage]) -> Sent:
    """Bytes that a pipeline rank with these stages sends."""
    kinds = {kind: sum(stage.sent(kind) for stage in stages) for kind in Sent._fields[:4]}
    # Two replicas, as they are traced, send what each of them has, once.
    kinds["all_reduce"] = 2 * share(kinds["all_reduce"], job.ranks.dp_replicate)
    exchanged = sum(int(stage.passes.exchanged) for stage in stages) - kinds["tp_all_reduce"]
    between = sum(map(_boundaries, stages)) * job.between_stages
    return Sent(**kinds, tp_layers=exchanged, pp=job.microbatches * between)


def _boundaries(stage: Stage) -> int:
    return (not stage.part.has_embedding) + (not stage.part.has_head)


def step_time(job: Job, ranks: Sequence[Sequence[Stage]], machine: Machine) -> StepTime:
    """The time of one step, given the stages of each pipeline rank.

    A pipeline fills and drains once: while one rank has a microbatch, all others wait; with several stages
    per rank, for a part of a microbatch.
    """
    # Ranks in the middle of a pipeline are equal.
    kinds = [tuple((id(stage.trace), *stage.part[1:]) for stage in stages) for stages in ranks]
    different = dict(zip(kinds, ranks, strict=True))
    of_kind = {kind: _RankTime(job, machine, stages) for kind, stages in different.items()}
    of_microbatches = {kind: each.microbatches() for kind, each in of_kind.items()}
    times, lines = [of_kind[kind] for kind in kinds], [of_microbatches[kind] for kind in kinds]
    seconds = [sum(each.values()) for each in lines]
    slowest = max(range(len(ranks)), key=lambda rank: seconds[rank])
    waits = (sum(seconds) - seconds[slowest]) / job.microbatches / len(ranks[slowest])
    found = {**lines[slowest], "pipeline bubble": waits, **times[slowest].once()}
    if isinstance(job.model, Model) or job.tokens is None:
        flops = times[0].flops
    else:
        # What a checkpoint computes twice does not count.
        flops = flops_per_token(job.model) * job.tokens / job.ranks.world
    return StepTime(
        lines={name: value for name, value in found.items() if value},
        communication=times[slowest].communication(),
        flops=flops,
        tokens=job.tokens,
        pp_rank=slowest,
    )


class _RankTime:
    """Times of one pipeline rank, in a step."""

    def __init__(self, job: Job, machine: Machine, stages: Sequence[Stage]) -> None:
        self._job, self._machine, self._stages = job, machine, stages
        self._groups = Groups.of(job.ranks, machine)
        self._units = [unit_plans(job, stage, machine) for stage in stages]
        self._passes = total(stage.passes for stage in stages)
        self._sent = sent_by(job, stages)

    @property
    def flops(self) -> float:
        """Operations of a step."""
        return self._passes.flops

    def microbatches(self) -> dict[str, float]:
        """Seconds by kind of all forwards and backwards."""
        passes, machine = self._passes, self._machine
        exchanged = (1 - machine.hidden_exchange) * self._exchanged()
        parameters = sum(map(self._bare, self._units))
        host = (
            machine.host_us_operator * passes.operators
            + machine.host_us_kernel * passes.kernels
            + machine.host_us_exchange * passes.exchanges
        ) / 1e6
        early = (self._job.microbatches - 1) * sum(
            unit.reduce_early for units in self._units for unit in units
        )
        return {
            "gemms": passes.gemms,
            "attention": passes.attention,
            "memory-bound": passes.memory + machine.felt_reduction * early,
            EXCHANGE: exchanged,
            PARAMETERS: parameters,
            STAGES: self._transfers(),
            HOST: max(0.0, host - passes.seconds - exchanged - parameters),
        }

    def once(self) -> dict[str, float]:
        """Seconds of the reductions after the last backward, and of the optimizer."""
        inner = self._units[0][1:]
        roots = sum(units[0].reduce for units in self._units)
        return {
            LAST_REDUCTION: roots + (inner[0].reduce if inner else 0.0),
            "optimizer": sum(stage.trace.optimizer.seconds for stage in self._stages),
        }

    def communication(self) -> float:
        """Seconds of all communication."""
        count = self._job.microbatches
        roots, layers = (count, 2 * count) if self._job.reshard_after_forward else (1, 1)
        parameters = sum(
            (layers if unit.name else roots) * unit.gather + unit.reduce + (count - 1) * unit.reduce_early
            for units in self._units
            for unit in units
        )
        return self._exchanged() + self._transfers() + parameters

    def _exchanged(self) -> float:
        calls = self._passes.exchanges
        return calls * self._groups.tp.seconds(self._sent.tp_layers / calls) if calls else 0.0

    def _transfers(self) -> float:
        """Seconds of receiving activations in forward and gradients in backward."""
        one = self._groups.pp.seconds(self._job.between_stages)
        return self._job.microbatches * sum(map(_boundaries, self._stages)) * one

    def _bare(self, units: Sequence[UnitPlan]) -> float:
        """Exposed seconds of gathers and reductions of a stage."""
        frees, count = self._job.reshard_after_forward, self._job.microbatches
        root, *inner = units
        first = root.gather + (inner[0].gather if inner else 0.0)
        first += sum(max(0.0, b.gather - a.forward) for a, b in pairwise(inner))
        again = sum(max(0.0, a.gather - b.backward) for a, b in pairwise(inner))
        # The last two units' run beside the next forwards.  After the last backward `once` counts them.
        early = [unit.reduce_early for unit in inner]
        beside = sum(unit.forward for unit in units[:SETTLED_BEFORE])
        exposed = self._not_hidden(inner, early) + max(0.0, root.reduce_early + sum(early[:1]) - beside)
        last = self._not_hidden(inner, [unit.reduce for unit in inner])
        return (count * (first + again) if frees else first) + (count - 1) * exposed + last

    def _not_hidden(self, units: Sequence[UnitPlan], reductions: Sequence[float]) -> float:
        """Seconds by which reductions in a backward take longer than the units that run beside them.

        Args:
            units: all but the root.
            reductions: seconds of each unit's.
        """
        # A unit's gather goes first.
        free = (
            max(0.0, unit.backward - (unit.gather if self._job.reshard_after_forward else 0.0))
            for unit in units
        )
        return sum(max(0.0, after - beside) for beside, after in zip(free, reductions[1:], strict=False))


def unit_plans(
    job: Job, stage: Stage, machine: Machine, saved: Mapping[str, int] | None = None
) -> list[UnitPlan]:
    """The units of a stage.

    Args:
        saved: bytes that their forwards have made, by name.
    """
    groups, ranks, dtype = Groups.of(job.ranks, machine), job.ranks, job.dtypes.reduce
    wide = torch.promote_types(dtype, torch.float32)

    def planned(unit: UnitTrace) -> UnitPlan:
        flat = _nbytes(unit.sizes, "flat buffer")
        gradients = [sizes["main_grad"] for sizes in unit.sizes if "main_grad" in sizes]
        numel = sum(each.numel for each in gradients)
        partial = sum(each.numel for each in gradients if each.placement is Placement.PARTIAL)
        own, own_partial = numel // ranks.dp_shard, partial // ranks.dp_shard
        over_shards = groups.dp_shard.seconds(share(numel * dtype.itemsize, ranks.dp_shard))
        return UnitPlan(
            name=stage.name_of(unit.name),
            parameters=unit.parameters,
            between_steps=_nbytes(unit.sizes, "master shard") + _nbytes(unit.sizes, "compute shard"),
            gathered=flat + _nbytes(unit.sizes, "transposed weights"),
            saved=(saved or {}).get(unit.name, 0),
            forward=stage.load(FORWARD, unit).seconds / job.microbatches,
            backward=stage.load(BACKWARD, unit).seconds / job.microbatches,
            gather=groups.dp_shard.seconds(share(flat, ranks.dp_shard)),
            reduce=over_shards
            + groups.dp_replicate.seconds(2 * share(own * dtype.itemsize, ranks.dp_replicate))
            + groups.tp.seconds(2 * share(own_partial * wide.itemsize, ranks.tp)),
            reduce_early=over_shards if job.grad_sync == "every" else 0.0,
        )

    distinct = {id(unit): unit for unit in stage.trace.units}
    plans = {key: planned(unit) for key, unit in distinct.items()}
    return [plans[id(unit)] for unit in stage.trace.units]


def _nbytes(groups: Sequence[GroupSizes], buffer: str) -> int:
    return sum(sizes[buffer].nbytes for sizes in groups if buffer in sizes)


def share(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of `nbytes`."""
    return nbytes * (ranks - 1) // ranks
