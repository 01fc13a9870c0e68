"""The time of a step: computation, exposed communication, and the pipeline's bubble.

In:   a `Job` and a `Machine`.
Out:  a `TimePlan` of the slowest pipeline rank.
Next: `cli/plan.py` prints it; `search.py` compares plans.

Overlap follows the engine:

    gathers of a layer       run beside the previous layer; exposed are any excess, the root's, and the first
                             in a forward
    reductions of a layer    run beside later layers in the last backward; exposed are the root's and the last
    tensor-parallel ranks    run beside GEMMs, by a measured share
    pipeline stages          no overlap: torch's schedules wait for what they receive

The plan ignores the memory bandwidth and multiprocessors that collectives take from concurrent GEMMs: with
much communication, planned steps are 6 to 9 % too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatfsdp.flat.layout import FlatLayout
from flatfsdp.models import flops_per_token
from flatfsdp.plan import compute
from flatfsdp.plan.activations import between_stages
from flatfsdp.plan.compute import Passes
from flatfsdp.plan.job import Job
from flatfsdp.plan.links import Groups
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.parts import Layouts, Part, layouts_of, parts_of
from flatfsdp.plan.traffic import Sent, exchanges_of_layer, gathers, of_stage, of_unit

EXCHANGE, PARAMETERS = "waiting for tensor-parallel ranks", "waiting for parameters and gradients"
STAGES, LAST_REDUCTION = "waiting for other stages", "waiting for the last reduction"
HOST = "waiting for the host"
BARE = (EXCHANGE, PARAMETERS, STAGES, LAST_REDUCTION)
"""Lines of exposed communication."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step, in seconds.

    Attributes:
        lines: seconds by kind, which add up to the step.
        communication: all communication of the rank in a step, hidden or not.
        flops: operations of one step on one GPU.
    """

    lines: dict[str, float]
    communication: float
    flops: float

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


@dataclass(frozen=True)
class TimePlan(StepTime):
    """The time of one step of a Llama; operations by `flops_per_token`.

    Attributes:
        pp_rank: the slowest pipeline rank, whose lines and communication these are.
        tokens: of all ranks.
    """

    pp_rank: int
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """The speed of all GPUs."""
        return self.tokens / self.seconds


def time_plan(job: Job, machine: Machine) -> TimePlan:
    """Plans the time of one step.

    Raises:
        ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8.
    """
    return step_of(job, machine, parts_of(job), layouts_of(job))


def step_of(job: Job, machine: Machine, parts: Sequence[Sequence[Part]], layouts: Layouts) -> TimePlan:
    """Plans the time of one step, given the stages of each pipeline rank.

    A pipeline fills and drains once: while one rank has a microbatch, all others wait; with several stages
    per rank, for a part of a microbatch.
    """
    groups = Groups.of(job.ranks, machine)
    # Ranks in the middle of a pipeline are equal.
    different = {tuple(each): RankTime(job, machine, groups, each, layouts) for each in parts}
    kinds = {each: rank.microbatch() for each, rank in different.items()}
    seconds = [sum(kinds[tuple(each)].values()) for each in parts]
    slowest = max(range(len(parts)), key=lambda rank: seconds[rank])
    own = tuple(parts[slowest])
    lines = {name: job.microbatches * value for name, value in kinds[own].items()}
    lines["pipeline bubble"] = (sum(seconds) - seconds[slowest]) / len(own)
    lines |= different[own].once()
    flops = flops_per_token(job.model) * job.step_tokens / job.ranks.world
    return TimePlan(
        lines={name: value for name, value in lines.items() if value},
        communication=different[own].communication(),
        flops=flops,
        pp_rank=slowest,
        tokens=job.step_tokens,
    )


@dataclass(frozen=True)
class RankTime:
    """Times of one pipeline rank."""

    job: Job
    machine: Machine
    groups: Groups
    parts: Sequence[Part]
    layouts: Layouts

    # ---- one microbatch ---------------------------------------------------------------------------------

    def microbatch(self) -> dict[str, float]:
        """Seconds by kind of forward and backward through all of the rank's stages, averaged over a step."""
        layer = compute.layer(self.job, self.machine)
        layers = sum(part.layers for part in self.parts)
        ends = [compute.head(self.job, self.machine)] * sum(part.has_head for part in self.parts)
        ends += [compute.embedding(self.job, self.machine)] * sum(part.has_embedding for part in self.parts)
        passes = [layer] * layers + ends
        exchanged = (1 - self.machine.hidden_exchange) * self._exchanged()
        bare = self._bare(layer)
        busy = sum(each.forward.seconds + each.backward.seconds for each in passes) + exchanged + bare
        return {
            "gemms": sum(each.forward.gemms + each.backward.gemms for each in passes),
            "attention": sum(each.forward.attention + each.backward.attention for each in passes),
            "memory-bound": sum(each.forward.memory + each.backward.memory for each in passes),
            EXCHANGE: exchanged,
            PARAMETERS: bare,
            STAGES: self._transfers(),
            HOST: max(0.0, layers * self._host_seconds() - busy),
        }

    def _host_seconds(self) -> float:
        """Host time of one layer."""
        machine = self.machine
        own = machine.host_ms_fp8 if self.job.is_fp8 else machine.host_ms_bf16
        return (own + exchanges_of_layer(self.job) * machine.host_ms_exchange) / 1e3

    def _exchanged(self) -> float:
        """Seconds of tensor-parallel communication in one microbatch."""
        exchanges = exchanges_of_layer(self.job)
        if not exchanges:
            return 0.0
        sent = sum(sum(of_stage(part, self.job)) for part in self.parts)
        calls = sum(part.layers for part in self.parts) * exchanges
        return calls * self.groups.tp.seconds(sent / calls)

    def _transfers(self) -> float:
        """Seconds of receiving activations in forward and gradients in backward."""
        if self.job.ranks.pp == 1:
            return 0.0
        ends = sum((not part.has_embedding) + (not part.has_head) for part in self.parts)
        return ends * self.groups.pp.seconds(between_stages(self.job))

    def _bare(self, layer: Passes) -> float:
        """Exposed seconds of gathers and reductions, averaged over a step's microbatches."""
        frees, count = self.job.reshard_after_forward, self.job.microbatches
        gather, reduce = self._gather(self.layouts.layer), self._reduce(self.layouts.layer)
        forward, backward = layer.forward.seconds, layer.backward.seconds
        layers = sum(part.layers for part in self.parts)
        roots = sum(self._gather(self.layouts.units(part)[0]) for part in self.parts)
        first = roots + len(self.parts) * gather + (layers - len(self.parts)) * max(0.0, gather - forward)
        again = layers * max(0.0, gather - backward)
        # In the last backward a layer's gather goes first.  Nothing follows the last layer: `once` counts it.
        last = (layers - 1) * max(0.0, reduce - max(0.0, backward - (gather if frees else 0.0)))
        return (first + again if frees else first / count) + last / count

    # ---- once a step ------------------------------------------------------------------------------------

    def once(self) -> dict[str, float]:
        """Seconds of the reductions after the last backward, and of the optimizer."""
        roots = [self.layouts.units(part)[0] for part in self.parts]
        units = [unit for part in self.parts for unit in self.layouts.units(part)]
        return {
            LAST_REDUCTION: self._reduce(roots[0]) + self._reduce(self.layouts.layer),
            "optimizer": compute.optimizer(units, self.job, self.machine),
        }

    def communication(self) -> float:
        """Seconds of all communication in a step."""
        times, layers = gathers(self.job), sum(part.layers for part in self.parts)
        layer, roots = self.layouts.layer, [self.layouts.units(part)[0] for part in self.parts]
        return (
            self.job.microbatches * (self._exchanged() + self._transfers())
            + layers * (times.layer * self._gather(layer) + self._reduce(layer))
            + sum(times.root * self._gather(root) + self._reduce(root) for root in roots)
        )

    # ---- collectives of one unit ------------------------------------------------------------------------

    def _sent(self, unit: Sequence[FlatLayout]) -> Sent:
        return of_unit(unit, self.job, times=1)

    def _gather(self, unit: Sequence[FlatLayout]) -> float:
        return self.groups.dp_shard.seconds(self._sent(unit).gather)

    def _reduce(self, unit: Sequence[FlatLayout]) -> float:
        sent, groups = self._sent(unit), self.groups
        return (
            groups.dp_shard.seconds(sent.reduce)
            + groups.dp_replicate.seconds(sent.all_reduce)
            + groups.tp.seconds(sent.tp_all_reduce)
        )
