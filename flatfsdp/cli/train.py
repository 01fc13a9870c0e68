"""`train`: trains the GPT once, and writes its losses as JSON and as a picture.

In:   a `TrainJob`.
Out:  a `TrainReport`, the same on every rank except for the times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flatfsdp.cli.console import StepBar
from flatfsdp.cli.report import plot_losses
from flatfsdp.comm.launch import Rank
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parity.loop import RunSummary, train
from flatfsdp.profiling import environment, to_json
from flatfsdp.training.jobs import Configuration, Settings, gpt_job


@dataclass(frozen=True)
class TrainJob:
    """Training to run."""

    settings: Settings[GPTConfig]
    configuration: Configuration
    optimize_backward_concat: bool

    @property
    def label(self) -> str:
        """The job in a few words."""
        return f"{self.configuration.name}, flag {'on' if self.optimize_backward_concat else 'off'}"


@dataclass(frozen=True)
class TrainReport:
    """Report of a finished run.

    Attributes:
        title: the job in a few words.
        tokens: number in a step of all ranks.
    """

    run: RunSummary
    environment: dict[str, Any]
    job: TrainJob = field(repr=False)
    title: str
    tokens: int

    def write(self, folder: Path) -> None:
        """Writes `train.json` and `losses.png`."""
        folder.joinpath("train.json").write_text(self.json() + "\n")
        plot_losses(folder / "losses.png", self.title, {"training loss": {"loss": self.run.losses}})

    def json(self) -> str:
        """The run as JSON."""
        return to_json(
            {"environment": self.environment, "options": asdict(self.job), "run": asdict(self.run)},
            indent=2,
        )

    def summary(self) -> str:
        """One sentence about the run."""
        run = self.run
        return (
            f"{self.title}: loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps, "
            f"{run.ms:.1f} ms a step, {1e3 * self.tokens / run.ms:,.0f} tokens/s"
        )


def train_on_rank(rank: Rank, job: TrainJob) -> TrainReport:
    """Trains; every rank must call it."""
    settings, how = job.settings, job.configuration
    tokens = rank.world * settings.microbatches * settings.batch * settings.model.seq
    sharding = replace(how.sharding, flag=job.optimize_backward_concat)
    make = gpt_job(settings, how, settings.sampler(), rank).trainee
    with StepBar(job.label, settings.steps, visible=rank.index == 0, tokens=tokens) as bar:
        run = train(make, sharding, rank, bar.show).summary
    return TrainReport(run, environment(rank), job, f"{job.label}, world size {rank.world}", tokens)
