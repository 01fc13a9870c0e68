"""Output of `plan`: tables of memory, traffic and time, or of the layouts that it has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flatfsdp.engine.whole.memory import GIB
from flatfsdp.plan import Job, Machine, Plan, UnitPlan
from flatfsdp.plan.advice import Advice
from flatfsdp.plan.job import Model
from flatfsdp.profiling.step_time import to_json

SENT = {
    "gather": "parameters gathered",
    "reduce": "gradients reduced over shards",
    "all_reduce": "gradients reduced over replicas",
    "tp_all_reduce": "gradients summed over tensor-parallel ranks",
    "tp_layers": "activations among tensor-parallel ranks",
    "pp": "activations between pipeline stages",
}
"""The lines of the table of traffic."""


@dataclass(frozen=True)
class PlanReport:
    """Plan of one way to run a job.

    Attributes:
        about: the model and its batches, in words; empty for a Llama.
        advice: what to change, if it does not fit.
    """

    about: str
    plan: Plan
    advice: Sequence[Advice]

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.plan.fits

    def json(self) -> str:
        """The report as JSON, in bytes and seconds, by the names of the tables' lines."""
        plan, memory, time = self.plan, self.plan.memory, self.plan.time
        found = {
            "fits": self.fits,
            **_described(plan.job, plan.machine, self.about),
            "parameters": plan.parameters,
            **_headline(plan),
            "memory": {
                "static": {line.name: line.nbytes for line in memory.static},
                "passing": {line.name: line.nbytes for line in memory.passing},
                "moment": memory.moment,
                "pp_rank": memory.pp_rank,
                "between_steps": memory.between_steps,
                "peak": memory.peak,
                "usable": plan.machine.usable_memory(),
            },
            "sent": plan.sent._asdict(),
            "seconds": time.lines,
            "communication_seconds": time.communication,
            "hidden_share": time.hidden_share,
            "units": [unit._asdict() for unit in plan.units],
            "too_large": {line.name: line.nbytes for line in plan.excess},
            "advice": [
                {
                    "changes": each.changes,
                    "options": _options(plan.job, each.plan.job),
                    "fits": each.plan.fits,
                    **_headline(each.plan),
                }
                for each in self.advice
            ],
        }
        return to_json(found, indent=2)

    def show(self, console: Console) -> None:
        """Prints the plan."""
        plan, job, time = self.plan, self.plan.job, self.plan.time
        tokens = "" if isinstance(job.model, Model) else f" of {job.batch} x {job.model.seq} tokens"
        console.print(
            f"{_model(job, self.about, plan.parameters)}\n{job.ranks.world} GPUs: {_spread(job)}; "
            f"{job.microbatches} microbatches{tokens}; {_products(job)}",
            highlight=False,
        )
        console.print(_units_table(plan.units))
        console.print(_memory_table(plan))
        if plan.sent.total:
            found = _table("Sent by one rank in a step", "", "GB")
            for kind, nbytes in plan.sent._asdict().items():
                if nbytes:
                    found.add_row(SENT[kind], f"{nbytes / 1e9:.2f}")
            found.add_row("together", f"{plan.sent.total / 1e9:.2f}", style="bold")
            console.print(found)
        found = _table(
            f"One step{f' of pipeline rank {time.pp_rank}' if job.ranks.pp > 1 else ''}", "", "ms", "share"
        )
        for name, seconds in time.lines.items():
            found.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / time.seconds:.1%}")
        speed = f"{time.flops_per_second / 1e12:.0f} TFLOP/s a GPU"
        if time.tokens_per_second is not None:
            speed = f"{time.tokens_per_second:,.0f} tokens/s, {speed}"
        found.add_row("together", f"{1e3 * time.seconds:.1f}", speed, style="bold")
        console.print(found)
        if time.hidden_share is not None:
            console.print(
                f"Communication takes {1e3 * time.communication:.1f} ms, {time.hidden_share:.0%} of it "
                "beside computation.",
                highlight=False,
            )
        self._show_verdict(console)

    def _show_verdict(self, console: Console) -> None:
        """Prints whether the memory suffices; if not, what is too large, and what would help."""
        plan, usable = self.plan, self.plan.machine.usable_memory()
        peak = plan.memory.peak
        console.print(
            f"It {'fits' if self.fits else 'DOES NOT FIT'}: {peak / GIB:.1f} GiB of {usable / GIB:.1f} (a "
            f"GPU's {plan.machine.gpu_memory / GIB:.1f} less what CUDA, NCCL and gaps take).",
            style="green" if self.fits else "bold red",
            highlight=False,
        )
        if self.fits:
            return
        lines = ", ".join(f"{line.name} {line.nbytes / GIB:.1f} GiB" for line in plan.excess)
        console.print(
            f"{(peak - usable) / GIB:.1f} GiB too much on {_whose(plan)}, at {plan.memory.moment}: {lines}.",
            highlight=False,
        )
        if not self.advice:
            console.print("No change that the planner knows would help; use a smaller model.")
            return
        found = _table("What would help", "", "GiB", "ms\na step", "it then")
        for each in self.advice:
            found.add_row(
                "; ".join(each.changes),
                f"{each.plan.memory.peak / GIB:.1f}",
                f"{1e3 * each.plan.time.seconds:,.0f}",
                "fits" if each.plan.fits else "does not fit",
            )
        console.print(found)
        best = self.advice[0].plan
        if best.fits:
            words = (
                f"It fits with {' '.join(_options(plan.job, best.job))}: {best.memory.peak / GIB:.1f} GiB."
            )
            console.print(words, style="green", highlight=False)
        else:
            console.print("None of these changes is enough, nor all that help together.")


@dataclass(frozen=True)
class SearchReport:
    """Plans of several ways to run a job, the fastest first."""

    job: Job
    machine: Machine
    global_batch: int
    plans: Sequence[Plan]

    @property
    def fits(self) -> bool:
        """Whether a layout was found."""
        return bool(self.plans)

    def json(self) -> str:
        """The report as JSON."""
        found = [
            {
                "ranks": _ranks(each.job),
                "batch": each.job.batch,
                "microbatches": each.job.microbatches,
                **_headline(each),
            }
            for each in self.plans
        ]
        described = _described(self.job, self.machine, "")
        return to_json({**described, "global_batch": self.global_batch, "found": found}, indent=2)

    def show(self, console: Console) -> None:
        """Prints the layouts."""
        console.print(_model(self.job, "", self.plans[0].parameters), highlight=False)
        title = f"{self.job.ranks.world} GPUs, {self.global_batch} sequences a step, {_products(self.job)}"
        found = _table(
            title, "layout", "batch x\nmicrobatches", "GiB", "ms\na step", "tokens/s", "TFLOP/s\na GPU"
        )
        for each in self.plans:
            found.add_row(
                _spread(each.job),
                f"{each.job.batch} x {each.job.microbatches}",
                f"{each.memory.peak / GIB:.1f}",
                f"{1e3 * each.time.seconds:,.0f}",
                f"{each.time.tokens_per_second:,.0f}",
                f"{each.time.flops_per_second / 1e12:.0f}",
            )
        console.print(found)


# ---- tables ---------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    """Makes an empty table; the first column is text, and so is the last of three."""
    found = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        is_text = not number or (number == 2 and len(columns) == 3)
        found.add_column(column, justify="left" if is_text else "right")
    return found


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    found = _table(f"Memory of {_whose(plan)}, at {memory.moment}", "", "GiB", "")
    for line in memory.static:
        found.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note or "always")
    between = f"{memory.between_steps / GIB:.2f}"
    found.add_row("between steps", between, "", style="bold", end_section=True)
    for line in memory.passing:
        found.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note)
    found.add_row("at most", f"{memory.peak / GIB:.2f}", "", style="bold")
    return found


def _units_table(units: Sequence[UnitPlan]) -> Table:
    found = _table(
        "Units, of one rank",
        *("unit", "million\nparameters", "shards,\nMiB", "gathered,\nMiB", "saved for\nbackward, MiB"),
        *("forward,\nms", "backward,\nms", "gather,\nms", "reduce,\nms"),
    )
    rows = [(unit.name or "(root)", _cells(unit)) for unit in units]
    for cells, alike in groupby(rows, key=itemgetter(1)):
        first, *others = [name for name, _ in alike]
        found.add_row(f"{first} to {others[-1].rpartition('.')[2]}" if others else first, *cells)
    return found


def _cells(unit: UnitPlan) -> tuple[str, ...]:
    """Cells of a unit's row; neighbours with equal rows share one."""
    return (
        f"{unit.parameters / 1e6:.1f}",
        *(f"{n / 2**20:.1f}" for n in (unit.between_steps, unit.gathered, unit.saved)),
        *(f"{1e3 * s:.2f}" for s in (unit.forward, unit.backward, unit.gather, unit.reduce)),
    )


# ---- words ----------------------------------------------------------------------------------------------


def _whose(plan: Plan) -> str:
    return "one rank" if plan.job.ranks.pp == 1 else f"a rank of pipeline rank {plan.memory.pp_rank}"


def _model(job: Job, about: str, parameters: int) -> str:
    if isinstance(job.model, Model):
        return f"{about}: {parameters / 1e6:,.1f} million parameters"
    model = job.model
    weights = model.layers * model.layer_weights + 2 * model.vocab * model.hidden
    return (
        f"{weights / 1e9:.3g} billion weights: {model.layers} layers, hidden {model.hidden}, "
        f"ffn {model.ffn}, {model.heads} heads in {model.kv_heads} groups, vocabulary {model.vocab}"
    )


def _spread(job: Job) -> str:
    """The layout in words, such as "pp 4 x dp_shard 16 x tp 8 + SP, interleaved, ZeRO-3"."""
    words = [str(job.ranks)]
    if job.ranks.pp > 1:
        words.append(job.schedule)
    if job.ranks.dp_shard > 1:
        words.append(f"ZeRO-{3 if job.reshard_after_forward else 2}")
    if job.grad_sync == "every":
        words.append("gradients reduced in every microbatch")
    if job.checkpoint_layers:
        words.append("layers checkpointed")
    return ", ".join(words)


def _options(before: Job, after: Job) -> list[str]:
    """The options of the command `plan` that make one job of another."""
    given, wanted = _given(before), _given(after)
    changed = {name: value for name, value in wanted.items() if value != given[name]}
    return [
        word for name, value in changed.items() for word in ([name] if value is True else [name, str(value)])
    ]


def _given(job: Job) -> dict[str, object]:
    """The options that `advise` may change, with their values; of a flag True, if it is set."""
    return {
        "--gpus": job.ranks.world,
        "--tp": job.ranks.tp,
        "--sequence-parallel": job.ranks.sequence_parallel,
        "--dp-replicate": job.ranks.dp_replicate,
        "--dp-shard": job.ranks.dp_shard,
        "--batch": job.batch,
        "--microbatches": job.microbatches,
        "--zero": 3 if job.reshard_after_forward else 2,
        "--grad-sync": job.grad_sync,
        "--checkpoint-layers": job.checkpoint_layers,
    }


def _products(job: Job) -> str:
    weights = ", FP8 weights" if job.stores_fp8 else ""
    kind = type(job.recipe).__name__ if job.recipe else str(job.dtypes.compute).removeprefix("torch.")
    return f"{kind}{weights}"


def _ranks(job: Job) -> dict[str, Any]:
    return {
        "gpus": job.ranks.world,
        **asdict(job.ranks),
        "schedule": job.schedule,
        "stages_per_rank": job.stages_per_rank,
        "reshard_after_forward": job.reshard_after_forward,
        "grad_sync": job.grad_sync,
        "checkpoint_layers": job.checkpoint_layers,
    }


def _described(job: Job, machine: Machine, about: str) -> dict[str, Any]:
    return {
        "model": about if isinstance(job.model, Model) else asdict(job.model),
        "ranks": _ranks(job),
        "batch": job.batch,
        "microbatches": job.microbatches,
        "compute": str(job.dtypes.compute),
        "recipe": repr(job.recipe),
        "fp8_weights": job.stores_fp8,
        "machine": asdict(machine),
    }


def _headline(plan: Plan) -> dict[str, Any]:
    return {
        "peak_gib": plan.memory.peak / GIB,
        "ms": 1e3 * plan.time.seconds,
        "tokens_per_s": plan.time.tokens_per_second,
        "tflops_per_gpu": plan.time.flops_per_second / 1e12,
    }
