"""`verify`: trains each configuration with `optimize_backward_concat` off and on, and compares the bits.

In:   a `VerifyJob`.
Out:  a `Report` with one `Row` a configuration, the same on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.table import Table
from rich.text import Text

from flatfsdp import FlatFSDP
from flatfsdp.cli.data import Sampler
from flatfsdp.cli.evidence import (
    KINDS,
    GradientRecorder,
    NamedTensors,
    evidence,
    first_difference,
    flip_lowest_bit,
)
from flatfsdp.cli.ranks import Rank
from flatfsdp.cli.report import RunSummary, environment, plot_losses, to_json
from flatfsdp.cli.training import PrecisionName, Strategy, TrainSettings, train


@dataclass(frozen=True)
class VerifyJob:
    """What to train: `settings`, once for each precision, strategy and setting of the flag.

    Attributes:
        self_test: damage one bit of one gradient in the flag-on runs, which `verify` must notice.
    """

    settings: TrainSettings
    precisions: tuple[PrecisionName, ...]
    strategies: tuple[Strategy, ...]
    self_test: bool = False

    def configurations(self) -> list[TrainSettings]:
        return [
            replace(self.settings, precision=precision, strategy=strategy)
            for precision in dict.fromkeys(self.precisions)
            for strategy in dict.fromkeys(self.strategies)
        ]


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        differences: for each kind of evidence, the first difference on each rank that has one.
    """

    precision: str
    strategy: str
    off: RunSummary
    on: RunSummary
    differences: dict[str, list[str]]

    @property
    def equal(self) -> bool:
        return not any(self.differences.values())

    @property
    def name(self) -> str:
        return f"{self.precision} {self.strategy}"


@dataclass(frozen=True)
class Report:
    """All configurations; `equal` only if every row is."""

    rows: list[Row]
    environment: dict[str, Any]
    job: VerifyJob = field(repr=False)

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)

    def json(self) -> str:
        rows = [{**asdict(row), "equal": row.equal, "falling": row.on.falling} for row in self.rows]
        options = asdict(self.job)
        for varied in ("precision", "strategy", "optimize_backward_concat"):
            del options["settings"][varied]
        return to_json(
            {"equal": self.equal, "environment": self.environment, "options": options, "rows": rows}
        )

    def write(self, folder: Path) -> None:
        """Writes `verify.json` and `losses.png`."""
        folder.joinpath("verify.json").write_text(self.json() + "\n")
        world, settings = self.environment["world_size"], self.job.settings
        plot_losses(
            folder / "losses.png",
            f"optimize_backward_concat off and on (world size {world}, {settings.microbatches} microbatches)",
            {row.name: {"flag off": row.off.losses, "flag on": row.on.losses} for row in self.rows},
        )


@dataclass(frozen=True)
class Saboteur:
    """An `AfterBackward` that flips one bit in step 1 on the last rank, then lets `recorder` see it."""

    recorder: GradientRecorder
    rank: Rank
    at_step: int

    def __call__(self, step: int, model: FlatFSDP) -> None:
        # One rank alone, and not the one that reports: the verdict must come from all of them.
        if step == self.at_step and self.rank.index == self.rank.world - 1:
            flip_lowest_bit(model)
        self.recorder(step, model)


def verify_on_rank(rank: Rank, job: VerifyJob) -> Report:
    """Runs all of it; every rank must call it, and all get the same verdict."""
    sampler = job.settings.sampler()
    rows = [_compare(rank, settings, sampler, job.self_test) for settings in job.configurations()]
    return Report(rows, environment(rank), job)


def _compare(rank: Rank, settings: TrainSettings, sampler: Sampler, self_test: bool) -> Row:
    off, off_evidence = _run(rank, replace(settings, optimize_backward_concat=False), sampler, False)
    on, on_evidence = _run(rank, replace(settings, optimize_backward_concat=True), sampler, self_test)
    mine = {kind: first_difference(off_evidence[kind], on_evidence[kind]) for kind in KINDS}
    everyones: list[dict[str, str | None]] = [{}] * rank.world
    dist.all_gather_object(everyones, mine)
    differences = {
        kind: [f"rank {index}: {found[kind]}" for index, found in enumerate(everyones) if found[kind]]
        for kind in KINDS
    }
    return Row(settings.precision.value, settings.strategy.value, off, on, differences)


def _run(
    rank: Rank, settings: TrainSettings, sampler: Sampler, sabotage: bool
) -> tuple[RunSummary, dict[str, NamedTensors]]:
    recorder = GradientRecorder()
    hook = Saboteur(recorder, rank, at_step=min(1, settings.steps - 1)) if sabotage else recorder
    trained = train(settings, sampler, rank, hook)
    return RunSummary.of(trained), evidence(trained, recorder.gradients)


def table(report: Report) -> Table:
    """One row a configuration; off above on within a cell."""
    result = Table(
        box=box.SIMPLE_HEAD,
        title="optimize_backward_concat off and on",
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("config", "flag", "final loss"):
        result.add_column(heading)
    for heading in ("ms\na step", "bytes copied\na parameter"):
        result.add_column(heading, justify="right")
    for heading in (*KINDS, "loss falling"):
        result.add_column(heading.replace(" ", "\n"))
    for row in report.rows:
        result.add_row(
            row.name,
            "off\non",
            f"{row.off.final_loss_hex}\n{row.on.final_loss_hex}",
            f"{row.off.ms:.1f}\n{row.on.ms:.1f}",
            f"{row.off.local_bytes:.2f}\n{row.on.local_bytes:.2f}",
            *(_verdict(not row.differences[kind], "equal", "DIFFER") for kind in KINDS),
            _verdict(row.on.falling, "yes", "NO"),
            end_section=row is not report.rows[-1],
        )
    return result


def _verdict(good: bool, yes: str, no: str) -> Text:
    return Text(yes, style="green") if good else Text(no, style="bold red")


def verdict_lines(report: Report) -> list[str]:
    """Where the runs differ, or one line that says that they do not."""
    if report.equal:
        return [
            f"Flag on equals flag off, bit for bit, at world size {report.environment['world_size']}: "
            f"{len(report.rows)} configurations, {report.job.settings.steps} steps each."
        ]
    return [
        f"{row.name}, {kind}: first difference on {place}"
        for row in report.rows
        for kind in KINDS
        for place in row.differences[kind]
    ]
