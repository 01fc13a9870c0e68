"""`plan --model` and `plan --hugging-face`: plan a user's own model, by `flatfsdp.plan.plan_model`.

In:   the names of two functions, or a configuration of Hugging Face, and options of `plan`.
Out:  a `ModelPlanReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flatfsdp.cli.plan_tables import figures, memory_table, show_verdict, table, time_table, traffic_table
from flatfsdp.cli.user_functions import function_named, with_own_layers
from flatfsdp.engine.whole.memory import GIB
from flatfsdp.plan import Machine
from flatfsdp.plan.any_model import ModelPlan, UnitPlan, plan_model
from flatfsdp.profiling import to_json
from flatfsdp.training.choices import PrecisionName

_MACHINE = ("machine", "gpu_memory", "gpus_per_host", "link_bandwidth", "network_bandwidth", "as_json")
_COMMON = {"gpus", "microbatches", "zero", "precision", "fp8_weights", *_MACHINE}
OPTIONS = {
    "--model": {"model", "batches", *_COMMON},
    "--hugging-face": {"hugging_face", "fuse", "checkpoint_layers", "batch", "seq", *_COMMON},
}
"""Options that apply to each kind of model; all others describe the Llama of this project."""


def kind_of(given: Collection[str]) -> str | None:
    """The kind of model that the command line names, a key of `OPTIONS`; None for our Llama.

    Raises:
        ValueError: if the options name two kinds, or only half of one, or if one does not apply.
    """
    if "hugging_face" in given:
        kind = "--hugging-face"
    elif {"model", "batches"} & set(given):
        kind = "--model"
        if {"model", "batches"} - set(given):
            raise ValueError("--model and --batches go together: one builds the model, one yields batches")
    else:
        if useless := [name for name in given if name in ("fuse", "checkpoint_layers")]:
            raise ValueError(f"{_option(useless[0])} needs --hugging-face, a configuration to apply it to")
        return None
    if useless := [name for name in given if name not in OPTIONS[kind]]:
        raise ValueError(f"{_option(useless[0])} does not apply with {kind}; leave it out")
    return kind


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class ModelPlanJob:
    """Job to plan; attributes are named after the options of `plan`."""

    gpus: int
    microbatches: int
    zero: int
    precision: PrecisionName
    fp8_weights: bool
    machine: Machine

    def own(self, model: str, batches: str) -> ModelPlanReport:
        """Plans the model that one function builds, with the batches that another one yields.

        Raises:
            ValueError: if one of the functions does not exist.
        """
        build, yielded = function_named(model), function_named(batches)
        found = islice(yielded(0, self.gpus), self.microbatches)
        return self._planned(model, partial(with_own_layers, build, self.precision), list(found))

    def hugging_face(
        self, config: Path, batch: int, seq: int | None, *, fuse: bool, checkpoint_layers: bool
    ) -> ModelPlanReport:
        """Plans a configuration of Hugging Face with random tokens.

        Raises:
            ValueError: if it is not the configuration of a language model.
        """
        from flatfsdp.compat.transformers.from_config import FromConfig

        fp8 = self.precision.recipe is not None
        source = FromConfig.load(config, fused=fuse, fp8=fp8, checkpointed=checkpoint_layers)
        build = source.build if fuse else partial(with_own_layers, source.build, self.precision)
        batches = list(source.batches(self.microbatches, batch, seq or source.longest or 1024))
        shape = tuple(batches[0]["input_ids"].shape)
        about = f"{source.architecture}, {shape[0]} x {shape[1]} tokens a microbatch"
        return self._planned(about, build, batches)

    def _planned(self, about: str, build: Callable[[], Any], batches: list[Any]) -> ModelPlanReport:
        try:
            plan = plan_model(
                build,
                batches,
                gpus=self.gpus,
                recipe=self.precision.recipe,
                machine=self.machine,
                precision=self.precision.dtypes(self.fp8_weights),
                reshard_after_forward=self.zero == 3,
            )
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return ModelPlanReport(about, self, plan)


@dataclass(frozen=True)
class ModelPlanReport:
    """Plan of a user's own model.

    Attributes:
        about: the model and its batches, in words.
    """

    about: str
    job: ModelPlanJob
    plan: ModelPlan

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory suffices."""
        return self.plan.fits

    def json(self) -> str:
        """The plan as JSON."""
        plan = self.plan
        return to_json(
            {
                "fits": self.fits,
                "model": self.about,
                "parameters": plan.parameters,
                "options": asdict(self.job),
                "peak_gib": plan.memory.peak / GIB,
                "ms": 1e3 * plan.time.seconds,
                "tflops_per_gpu": plan.time.flops_per_second / 1e12,
                **figures(plan.memory, plan.sent, plan.time, plan.machine),
                "units": [asdict(unit) for unit in plan.units],
            },
            indent=2,
        )

    def show(self, console: Console) -> None:
        """Prints the plan."""
        plan, job = self.plan, self.job
        weights = ", FP8 weights" if job.precision.dtypes(job.fp8_weights).fp8_weights else ""
        console.print(
            f"{self.about}: {plan.parameters / 1e6:,.1f} million parameters\n"
            f"{plan.gpus} GPU{'s' if plan.gpus > 1 else ''}, ZeRO-{job.zero}; {plan.microbatches} "
            f"microbatches; {job.precision.value}{weights}",
            highlight=False,
        )
        console.print(self._units_table())
        console.print(memory_table(plan.memory, "one rank"))
        if plan.sent.total:
            console.print(traffic_table(plan.sent))
        console.print(time_table(plan.time, "One step"))
        show_verdict(console, plan.memory, plan.time, plan.machine)

    def _units_table(self) -> Table:
        found = table(
            "Units, of one rank",
            "unit",
            "million\nparameters",
            "shards,\nMiB",
            "gathered,\nMiB",
            "saved for\nbackward, MiB",
            "forward,\nms",
            "backward,\nms",
            "gather,\nms",
            "reduce,\nms",
        )
        rows = [(unit.name or "(root)", _cells(unit)) for unit in self.plan.units]
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
