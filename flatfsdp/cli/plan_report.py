"""What `plan` prints: tables of memory, traffic and time, or of the layouts that it has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flatfsdp.engine.memory import GIB
from flatfsdp.plan import Candidate, Job, Machine, MemoryPlan, Sent, TimePlan, memory_plan, time_plan
from flatfsdp.plan.parts import parts_of
from flatfsdp.plan.traffic import named, sent_by_rank
from flatfsdp.profiling.figures import to_json


@dataclass(frozen=True)
class PlanReport:
    """Plan of one way to run a job.

    Attributes:
        sent: by the rank that sends most.
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
        return self.memory.peak <= self.machine.usable_memory()

    def json(self) -> str:
        return to_json(
            {
                "fits": self.fits,
                **_described(self.job, self.machine),
                **_figures(self.memory, self.time),
                "memory": {
                    **asdict(self.memory),
                    "static": _by_name(self.memory.static),
                    "passing": _by_name(self.memory.passing),
                    "between_steps": self.memory.between_steps,
                    "peak": self.memory.peak,
                    "usable": self.machine.usable_memory(),
                },
                "sent": self.sent._asdict(),
                "seconds": self.time.lines,
                "communication_seconds": self.time.communication,
                "hidden_share": self.time.hidden_share,
            },
            indent=2,
        )

    def show(self, console: Console) -> None:
        job = self.job
        layers = " + ".join(str(part.layers) for part in parts_of(job)[self.memory.pp_rank])
        console.print(
            f"{_sizes(job)}\n{job.ranks.world} GPUs: {_spread(job)}; {job.microbatches} microbatches of "
            f"{job.batch} x {job.model.seq} tokens; {_products(job)}",
            highlight=False,
        )
        where = f", pipeline rank {self.memory.pp_rank} with {layers} layers" if job.ranks.pp > 1 else ""
        console.print(self._memory_table(f"Memory of the fullest rank{where}, at {self.memory.moment}"))
        console.print(self._traffic_table())
        console.print(self._time_table())
        hidden = self.time.hidden_share
        if hidden is not None:
            console.print(
                f"Communication takes {1e3 * self.time.communication:.1f} ms, {hidden:.0%} of it beside "
                "computation.",
                highlight=False,
            )
        verdict = "fits" if self.fits else "DOES NOT FIT"
        console.print(
            f"It {verdict}: {self.memory.peak / GIB:.1f} GiB of {self.machine.usable_memory() / GIB:.1f} "
            f"(a GPU's {self.machine.gpu_memory / GIB:.1f} less what CUDA, NCCL and gaps take).",
            style="green" if self.fits else "bold red",
            highlight=False,
        )

    def _memory_table(self, title: str) -> Table:
        table = _table(title, "", "GiB", "")
        for line in self.memory.static:
            table.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note or "always")
        table.add_row(
            "between steps", f"{self.memory.between_steps / GIB:.2f}", "", style="bold", end_section=True
        )
        for line in self.memory.passing:
            table.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note)
        table.add_row("at most", f"{self.memory.peak / GIB:.2f}", "", style="bold")
        return table

    def _traffic_table(self) -> Table:
        table = _table("Sent by one rank in a step", "", "GB")
        for name, nbytes in named(self.sent):
            if nbytes:
                table.add_row(name, f"{nbytes / 1e9:.2f}")
        table.add_row("together", f"{self.sent.total / 1e9:.2f}", style="bold")
        return table

    def _time_table(self) -> Table:
        where = f" of pipeline rank {self.time.pp_rank}" if self.job.ranks.pp > 1 else ""
        table = _table(f"One step{where}", "", "ms", "share")
        for name, seconds in self.time.lines.items():
            table.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / self.time.seconds:.1%}")
        table.add_row(
            "together",
            f"{1e3 * self.time.seconds:.1f}",
            f"{self.time.tokens_per_second:,.0f} tokens/s, "
            f"{self.time.flops_per_second / 1e12:.0f} TFLOP/s a GPU",
            style="bold",
        )
        return table


@dataclass(frozen=True)
class SearchReport:
    """Plans of several ways to run a job, the fastest first."""

    job: Job
    machine: Machine
    global_batch: int
    candidates: Sequence[Candidate]

    @property
    def fits(self) -> bool:
        return bool(self.candidates)

    def json(self) -> str:
        found = [
            {
                "ranks": _ranks(each.job),
                "batch": each.job.batch,
                "microbatches": each.job.microbatches,
                **_figures(each.memory, each.time),
            }
            for each in self.candidates
        ]
        return to_json(
            {**_described(self.job, self.machine), "global_batch": self.global_batch, "found": found},
            indent=2,
        )

    def show(self, console: Console) -> None:
        console.print(_sizes(self.job), highlight=False)
        title = f"{self.job.ranks.world} GPUs, {self.global_batch} sequences a step, {_products(self.job)}"
        table = _table(
            title, "layout", "batch x\nmicrobatches", "GiB", "ms\na step", "tokens/s", "TFLOP/s\na GPU"
        )
        for each in self.candidates:
            table.add_row(
                _spread(each.job),
                f"{each.job.batch} x {each.job.microbatches}",
                f"{each.memory.peak / GIB:.1f}",
                f"{1e3 * each.time.seconds:,.0f}",
                f"{each.time.tokens_per_second:,.0f}",
                f"{each.time.flops_per_second / 1e12:.0f}",
            )
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    """The first column is text, and so is the last of three."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="left" if (number in (0, 2) and len(columns) <= 3) or not number else "right"
        )
    return table


def _sizes(job: Job) -> str:
    model = job.model
    weights = model.layers * model.layer_weights + 2 * model.vocab * model.hidden
    return (
        f"{weights / 1e9:.3g} billion weights: {model.layers} layers, hidden {model.hidden}, "
        f"ffn {model.ffn}, {model.heads} heads in {model.kv_heads} groups, vocabulary {model.vocab}"
    )


def _spread(job: Job) -> str:
    """Such as "pp 4 x dp_shard 16 x tp 8 + SP, interleaved, ZeRO-3"."""
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


def _figures(memory: MemoryPlan, time: TimePlan) -> dict[str, Any]:
    return {
        "peak_gib": memory.peak / GIB,
        "ms": 1e3 * time.seconds,
        "tokens_per_s": time.tokens_per_second,
        "tflops_per_gpu": time.flops_per_second / 1e12,
    }


def _by_name(lines: Sequence[Any]) -> dict[str, int]:
    return {line.name: line.nbytes for line in lines}
