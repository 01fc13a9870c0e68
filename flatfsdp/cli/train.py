"""`train`: trains the GPT once, and writes its losses as JSON and as a picture.

In:   `TrainSettings`.
Out:  a `TrainReport`, the same on every rank except for the times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatfsdp.cli.progress import StepBar
from flatfsdp.cli.report import plot_losses
from flatfsdp.comm.launch import Rank
from flatfsdp.parity.summary import RunSummary
from flatfsdp.profiling.environment import environment
from flatfsdp.profiling.figures import to_json
from flatfsdp.training.gpt import TrainSettings, train


@dataclass(frozen=True)
class TrainReport:
    """Report of a finished run."""

    run: RunSummary
    environment: dict[str, Any]
    settings: TrainSettings = field(repr=False)

    def json(self) -> str:
        """The run as JSON."""
        return to_json(
            {"environment": self.environment, "options": asdict(self.settings), "run": asdict(self.run)},
            indent=2,
        )

    def write(self, folder: Path) -> None:
        """Writes `train.json` and `losses.png`."""
        folder.joinpath("train.json").write_text(self.json() + "\n")
        plot_losses(folder / "losses.png", self._title(), {"training loss": {"loss": self.run.losses}})

    def summary(self) -> str:
        """One sentence about the run."""
        settings, losses = self.settings, self.run.losses
        tokens = self.environment["world_size"] * settings.microbatches * settings.batch * settings.model.seq
        return (
            f"{self._title()}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, "
            f"{self.run.ms:.1f} ms a step, {1e3 * tokens / self.run.ms:,.0f} tokens/s"
        )

    def _title(self) -> str:
        return f"{self.settings.label}, world size {self.environment['world_size']}"


def train_on_rank(rank: Rank, settings: TrainSettings) -> TrainReport:
    """Trains; every rank must call it."""
    with StepBar(settings.label, settings.steps, visible=rank.index == 0, shows_speed=True) as bar:
        trained = train(settings, settings.sampler(), rank, bar.advance)
    return TrainReport(RunSummary.of(trained), environment(rank), settings)
