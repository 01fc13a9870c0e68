"""The memory of one rank, between steps and at the fullest moment of a step.

In:   the traced `Stage`s of a pipeline rank.
Out:  a `StepMemory`.
Next: `plan.py` takes that of the rank that needs most.

A trace has one microbatch at a time.  In a pipeline several wait for their backward: each of them keeps what
its forward has made, and so do those of the rank's other stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.stages import Stage
from flatfsdp.plan.trace.places import FORWARD, OPTIMIZER
from flatfsdp.plan.trace.step import REST, USES, Moment

SHOWN = 2**20
"""Bytes of the smallest line."""
NOTES = {
    "flat buffer": "gathered parameters",
    "transposed weights": "FP8, for the backward",
    "main_grad": "unsharded, until it is reduced",
    "reduced gradient": "shards, until zero_grad",
    "activations": "that forwards have made",
    "backward": "what it needs beside, gradients on their way",
    "optimizer": "what a step needs beside",
    "other": "",
}
"""Uses of memory that comes and goes, in the order of the table."""


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
    """Memory of one rank at the fullest moment of a step, in bytes.

    Attributes:
        static: lines that also exist between steps.
        passing: all other lines.
        moment: when the peak is.
        pp_rank: the pipeline rank.
        saved: bytes that each unit's forwards have made and that are there then, by name.
    """

    static: tuple[Line, ...]
    passing: tuple[Line, ...]
    moment: str
    pp_rank: int
    saved: Mapping[str, int]

    @property
    def between_steps(self) -> int:
        """Bytes between steps."""
        return sum(line.nbytes for line in self.static)

    @property
    def peak(self) -> int:
        """Peak of bytes from PyTorch's allocator, without CUDA's and NCCL's own, and without gaps."""
        return self.between_steps + sum(line.nbytes for line in self.passing)


def in_flight(job: Job, rank: int) -> list[int]:
    """Microbatches of each stage of pipeline rank `rank` when it holds most.

    The orders are those of torch.distributed.pipelining: `tests/dist/plan/test_plan.py` checks them.

    plain         1
    GPipe         all
    1F1B          the number of ranks from this one to the last
    interleaved   (stages - 1) * round + 2 * (ranks after this one) + 1 chunks, dealt out in rounds of about
                  as many microbatches as there are ranks
    """
    ranks, count = job.ranks, job.microbatches
    if ranks.pp == 1:
        return [1]
    if not job.is_interleaved:
        return [count if job.schedule == "gpipe" else min(count, ranks.pp - rank)]
    stages = job.stages_per_rank
    a_round = count // max(1, count // ranks.pp)
    chunks = min((stages - 1) * a_round + 2 * (ranks.pp - 1 - rank) + 1, count * stages)
    held = Counter(chunk // a_round % stages for chunk in range(chunks))
    return [held[stage] for stage in range(stages)]


def memory_of(job: Job, rank: int, stages: Sequence[Stage], machine: Machine) -> StepMemory:
    """Memory of a pipeline rank."""
    flying = in_flight(job, rank)
    stage, moment, held = max(_moments(job, stages, flying), key=lambda found: found[2].total())
    lines = [Line(name, held[name], note) for name, note in NOTES.items()]
    return StepMemory(
        _static(job, stages, machine),
        tuple(line for line in lines if abs(line.nbytes) >= SHOWN),
        _words(moment, stage, job),
        rank,
        {unit.name: unit.saved[moment] for unit in stage.trace.units},
    )


def _moments(
    job: Job, stages: Sequence[Stage], flying: Sequence[int]
) -> Iterator[tuple[Stage, Moment, Counter[str]]]:
    """What is held on the rank at each moment of each of its stages, by use."""
    activations = USES[FORWARD]
    for stage in stages:
        for number, done in enumerate(_done_before(stage.times)):
            # Once microbatches have ended, no more of them are in flight than are left.
            left = job.microbatches - done
            beside: Counter[str] = Counter()
            for other, count in zip(stages, flying, strict=True):
                waiting = Counter(other.trace.waiting[number])
                more = min(count, left) - (1 if other is stage else 0)
                if other is not stage:
                    beside.update(waiting)
                    more -= 1
                beside[activations] += more * waiting[activations]
            for moment, held in stage.trace.moments.items():
                if moment.round == number:
                    found = Counter(held)
                    found.update(beside)
                    yield stage, moment, found


def _done_before(times: Sequence[int]) -> Iterator[int]:
    """Microbatches that have ended when each round begins."""
    done = 0
    for count in times:
        yield done
        done += count


def _static(job: Job, stages: Sequence[Stage], machine: Machine) -> tuple[Line, ...]:
    found: Counter[str] = Counter()
    for stage in stages:
        found.update(stage.trace.static)
        given = sum(times * nbytes for times, nbytes in zip(stage.times, stage.trace.given, strict=True))
        found["pipeline buffers" if job.ranks.pp > 1 else REST] += given
    notes = {
        REST: "buffers of the model, batches, scales",
        "pipeline buffers": f"received, {job.microbatches} microbatches",
    }
    lines = [Line(name, nbytes, notes.get(name, "")) for name, nbytes in found.items() if nbytes]
    return (*lines, Line("cuBLAS workspaces", machine.workspaces, "one a thread"))


def _words(moment: Moment, stage: Stage, job: Job) -> str:
    if moment.phase == OPTIMIZER:
        return "the optimizer's step"
    unit = stage.name_of(moment.unit) if moment.since == 0 else ""
    return f"the {moment.phase}{f' of {unit}' if unit else ''}"
