"""Output of `plan`: tables of memory, traffic and time, or of the layouts that it has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from flatfsdp.cli.plan_tables import figures, memory_table, show_verdict, table, time_table, traffic_table
from flatfsdp.engine.whole.memory import GIB
from flatfsdp.plan import Candidate, Job, Machine, MemoryPlan, Sent, TimePlan, memory_plan, time_plan
from flatfsdp.plan.parts import parts_of
from flatfsdp.plan.traffic import sent_by_rank
from flatfsdp.profiling import to_json


@dataclass(frozen=True)
class PlanReport:
    """Plan of one way to run a job.

    Attributes:
        sent: bytes that the busiest rank sends.
    """

    job: Job
    machine: Machine
    memory: MemoryPlan
    sent: Sent
    time: TimePlan

    @staticmethod
    def of(job: Job, machine: Machine) -> PlanReport:
        """Plans the job on the machine.

        Raises:
            ValueError: if ranks cannot share a size.
        """
        sent = max(sent_by_rank(job), key=lambda each: each.total)
        return PlanReport(job, machine, memory_plan(job), sent, time_plan(job, machine))

    @property
    def fits(self) -> bool:
        """Whether it can run: the memory suffices, or a layout was found."""
        return self.memory.peak <= self.machine.usable_memory()

    def json(self) -> str:
        """The report as JSON."""
        return to_json(
            {
                "fits": self.fits,
                **_described(self.job, self.machine),
                **_headline(self.memory, self.time),
                **figures(self.memory, self.sent, self.time, self.machine),
            },
            indent=2,
        )

    def show(self, console: Console) -> None:
        """Prints the plan."""
        job = self.job
        layers = " + ".join(str(part.layers) for part in parts_of(job)[self.memory.pp_rank])
        console.print(
            f"{_sizes(job)}\n{job.ranks.world} GPUs: {_spread(job)}; {job.microbatches} microbatches of "
            f"{job.batch} x {job.model.seq} tokens; {_products(job)}",
            highlight=False,
        )
        where = f", pipeline rank {self.memory.pp_rank} with {layers} layers" if job.ranks.pp > 1 else ""
        console.print(memory_table(self.memory, f"the fullest rank{where}"))
        console.print(traffic_table(self.sent))
        stage = f" of pipeline rank {self.time.pp_rank}" if job.ranks.pp > 1 else ""
        speed = f"{self.time.tokens_per_second:,.0f} tokens/s"
        console.print(time_table(self.time, f"One step{stage}", speed))
        show_verdict(console, self.memory, self.time, self.machine)


@dataclass(frozen=True)
class SearchReport:
    """Plans of several ways to run a job, the fastest first."""

    job: Job
    machine: Machine
    global_batch: int
    candidates: Sequence[Candidate]

    @property
    def fits(self) -> bool:
        """Whether it can run: the memory suffices, or a layout was found."""
        return bool(self.candidates)

    def json(self) -> str:
        """The report as JSON."""
        found = [
            {
                "ranks": _ranks(each.job),
                "batch": each.job.batch,
                "microbatches": each.job.microbatches,
                **_headline(each.memory, each.time),
            }
            for each in self.candidates
        ]
        return to_json(
            {**_described(self.job, self.machine), "global_batch": self.global_batch, "found": found},
            indent=2,
        )

    def show(self, console: Console) -> None:
        """Prints the layouts."""
        console.print(_sizes(self.job), highlight=False)
        title = f"{self.job.ranks.world} GPUs, {self.global_batch} sequences a step, {_products(self.job)}"
        found = table(
            title, "layout", "batch x\nmicrobatches", "GiB", "ms\na step", "tokens/s", "TFLOP/s\na GPU"
        )
        for each in self.candidates:
            found.add_row(
                _spread(each.job),
                f"{each.job.batch} x {each.job.microbatches}",
                f"{each.memory.peak / GIB:.1f}",
                f"{1e3 * each.time.seconds:,.0f}",
                f"{each.time.tokens_per_second:,.0f}",
                f"{each.time.flops_per_second / 1e12:.0f}",
            )
        console.print(found)


def _sizes(job: Job) -> str:
    model = job.model
    weights = model.layers * model.layer_weights + 2 * model.vocab * model.hidden
    return (
        f"{weights / 1e9:.3g} billion weights: {model.layers} layers, hidden {model.hidden}, "
        f"ffn {model.ffn}, {model.heads} heads in {model.kv_heads} groups, vocabulary {model.vocab}"
    )


def _spread(job: Job) -> str:
    """The layout in words, such as "pp 4 x dp_shard 16 x tp 8 + SP, interleaved, ZeRO-3"."""
    schedule = f", {job.schedule}" if job.ranks.pp > 1 else ""
    zero = f", ZeRO-{3 if job.reshard_after_forward else 2}" if job.ranks.dp_shard > 1 else ""
    return f"{job.ranks}{schedule}{zero}"


def _ranks(job: Job) -> dict[str, Any]:
    return {
        "gpus": job.ranks.world,
        **asdict(job.ranks),
        "schedule": job.schedule,
        "stages_per_rank": job.stages_per_rank,
        "reshard_after_forward": job.reshard_after_forward,
    }


def _products(job: Job) -> str:
    weights = ", FP8 weights" if job.stores_fp8 else ""
    kind = type(job.recipe).__name__ if job.recipe else str(job.precision.compute).removeprefix("torch.")
    return f"{kind}{weights}"


def _described(job: Job, machine: Machine) -> dict[str, Any]:
    return {
        "model": asdict(job.model),
        "ranks": _ranks(job),
        "batch": job.batch,
        "microbatches": job.microbatches,
        "compute": str(job.precision.compute),
        "recipe": repr(job.recipe),
        "fp8_weights": job.stores_fp8,
        "machine": asdict(machine),
    }


def _headline(memory: MemoryPlan, time: TimePlan) -> dict[str, Any]:
    return {
        "peak_gib": memory.peak / GIB,
        "ms": 1e3 * time.seconds,
        "tokens_per_s": time.tokens_per_second,
        "tflops_per_gpu": time.flops_per_second / 1e12,
    }
