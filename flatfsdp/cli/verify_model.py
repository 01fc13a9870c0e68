"""`verify --model`: verifies a user's own model with each switch off and on, by `flatfsdp.parity.verify`.

In:   the names of two functions, and options of `verify`.
Out:  a `ModelReport`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from flatfsdp.cli.report import compared_cells, comparison_table
from flatfsdp.cli.user_functions import function_named, with_own_layers
from flatfsdp.comm.launch import Rank
from flatfsdp.parity import ModelSwitch, Parity, verify
from flatfsdp.parity.evidence import KINDS
from flatfsdp.profiling.environment import environment
from flatfsdp.profiling.figures import to_json
from flatfsdp.training.choices import PrecisionName


@dataclass(frozen=True)
class ModelVerifyJob:
    """Model, data and switches to verify.

    Attributes:
        model: "package.module:function" or "path/to/file.py:function"; the function builds the model.
        batches: the same for the function that yields batches, see `flatfsdp.parity.verify`.
        precision: precision; for bf16-fused and FP8, `convert` makes our layers compute the GEMMs.
        switches: switches to compare; None for all that make a difference.
    """

    model: str
    batches: str
    precision: PrecisionName = PrecisionName.fp32
    switches: tuple[ModelSwitch, ...] | None = None
    steps: int = 4
    microbatches: int = 2
    lr: float = 1e-3
    seed: int = 0
    self_test: bool = False


OPTIONS = {"model", "batches", "steps", "microbatches", "lr", "seed", "self_test"}
"""Options of `verify` that have the same names here."""
WITH_OTHERS = {*OPTIONS, "precision", "switch", "ranks", "device", "out", "json"}


def model_job(given: dict[str, Any]) -> ModelVerifyJob:
    """Makes the job from these options of `verify`.

    Raises:
        ValueError: if an option does not apply to a user's own model, or a function does not exist.
    """
    if {"model", "batches"} - given.keys():
        raise ValueError("--model and --batches go together: one builds the model, one yields batches")
    useless = [f"--{name.replace('_', '-')}" for name in given if name not in WITH_OTHERS]
    if useless:
        raise ValueError(f"{useless[0]} does not apply to a model of your own; leave it out")
    precisions = list(given.get("precision", [PrecisionName.fp32]))
    if len(precisions) > 1:
        raise ValueError(f"--model takes one --precision, not {len(precisions)}")
    switches = None
    if "switch" in given:
        names = [switch.value for switch in given["switch"]]
        known = [each.value for each in ModelSwitch]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"--switch {unknown[0]} needs a model of this project; choose among {known}")
        switches = tuple(ModelSwitch(name) for name in names)
    for name in (given["model"], given["batches"]):
        function_named(name)
    chosen = {name: value for name, value in given.items() if name in OPTIONS}
    return ModelVerifyJob(precision=precisions[0], switches=switches, **chosen)


@dataclass(frozen=True)
class ModelReport:
    """Report of a user's own model."""

    parity: Parity
    environment: dict[str, Any]
    job: ModelVerifyJob = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all rows have equal bits."""
        return self.parity.equal

    def json(self) -> str:
        """The report as JSON."""
        rows = [{**asdict(row), "equal": row.equal} for row in self.parity.rows]
        about = {"environment": self.environment, "options": asdict(self.job)}
        left_out = self.parity.left_out
        return to_json({"equal": self.equal, **about, "rows": rows, "left_out": left_out}, indent=2)

    def write(self, folder: Path) -> list[Path]:
        """Writes the report; returns the files."""
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "verify-model.json"
        text.write_text(self.json() + "\n")
        return [text]

    def table(self) -> Table:
        """Table with one row a switch; off above on within a cell."""
        result = comparison_table(
            f"{self.job.model}, {self.job.precision.value}: the same bits?", ("switch", "final loss"), KINDS
        )
        for row in self.parity.rows:
            result.add_row(
                "\n".join(row.ends),
                *compared_cells(row.off, row.on, row.differences),
                end_section=row is not self.parity.rows[-1],
            )
        return result

    def verdict_lines(self) -> list[str]:
        """Lines that name the differences, or one line that says there are none."""
        if self.equal:
            return [
                f"On equals off, bit for bit, at world size {self.parity.world_size}: "
                f"{len(self.parity.rows)} switches, {self.job.steps} steps each."
            ]
        return self.parity.differences()

    def left_out_lines(self) -> list[str]:
        """Lines with the switches that make no difference to the model, and the reasons."""
        return [f"Left out: {name}, as {why}." for name, why in self.parity.left_out.items()]


def verify_model_on_rank(rank: Rank, job: ModelVerifyJob) -> ModelReport:
    """Runs all switches; every rank must call it, and all get the same verdicts."""
    build, batches = function_named(job.model), function_named(job.batches)
    parity = verify(
        partial(with_own_layers, build, job.precision),
        batches,
        switches=job.switches,
        precision=job.precision.dtypes(),
        recipe=job.precision.recipe,
        steps=job.steps,
        microbatches=job.microbatches,
        lr=job.lr,
        seed=job.seed,
        device=rank.device,
        self_test=job.self_test,
    )
    return ModelReport(parity, environment(rank), job)
