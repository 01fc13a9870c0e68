"""`plan`: what a training step will take, before anything is built.

In:   a `Job` and a `Machine`.
Out:  a `Plan`: memory of the fullest rank, traffic of the busiest, time of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import Line, StepMemory, memory_of
from flatfsdp.plan.stages import Tracer
from flatfsdp.plan.time import Sent, StepTime, UnitPlan, sent_by, step_time, unit_plans


@dataclass(frozen=True)
class Plan:
    """Memory, traffic and time of one step.

    Attributes:
        memory: of the rank that needs most, at its fullest moment.
        sent: bytes that the busiest rank sends in a step.
        time: of the slowest pipeline rank.
        units: of the rank that needs most memory; the root of each stage first.
        parameters: elements of the whole model, of one tensor-parallel rank.
    """

    job: Job
    machine: Machine
    memory: StepMemory
    sent: Sent
    time: StepTime
    units: tuple[UnitPlan, ...]
    parameters: int

    @property
    def excess(self) -> tuple[Line, ...]:
        """The largest lines of memory without which it would fit; none if it fits."""
        left, found = self.memory.peak, []
        for line in sorted((*self.memory.static, *self.memory.passing), key=lambda line: -line.nbytes):
            if left > self.machine.usable_memory():
                found.append(line)
                left -= line.nbytes
        return tuple(found)

    @property
    def fits(self) -> bool:
        """Whether it needs less memory than the machine has."""
        return self.memory.peak <= self.machine.usable_memory()


def plan(job: Job, machine: Machine | None = None, tracer: Tracer | None = None) -> Plan:
    """Plans a training step, without a GPU or a process group.

        plan = plan(Job(PRESETS["8b"], Parallelism(dp_shard=8), microbatches=4))
        print(plan.memory.peak / 2**30, plan.time.seconds, plan.fits)

    The engine's own step runs on the meta device, where tensors have shapes and no memory: what it allocates
    is counted as a GPU would, every operator takes its operations or bytes over the rates of the machine, and
    what is sent is what the byte ledger says.  Attention is taken to be a fused kernel.  Conditions on values
    are those of a plain batch: `all` is True, and `any` is False.  Of layers that are alike, a few run.

    Args:
        machine: None for hosts of eight H200s.
        tracer: has what earlier plans for the same machine have traced.

    Raises:
        NotImplementedError: for an operator that needs values, naming it.
        RuntimeError: if the process has a process group.
        ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8; as
            `shard`; if the model returns no loss.
    """
    machine = machine or Machine()
    ranks = (tracer or Tracer(machine)).stages(job)
    plans = [memory_of(job, rank, stages, machine) for rank, stages in enumerate(ranks)]
    memory = max(plans, key=lambda each: each.peak)
    units = [
        unit for stage in ranks[memory.pp_rank] for unit in unit_plans(job, stage, machine, memory.saved)
    ]
    return Plan(
        job=job,
        machine=machine,
        memory=memory,
        sent=max((sent_by(job, stages) for stages in ranks), key=lambda each: each.total),
        time=step_time(job, ranks, machine),
        units=tuple(units),
        parameters=sum(unit.parameters for stages in ranks for stage in stages for unit in stage.trace.units),
    )
