"""Logs of a training run: lines of JSON, TensorBoard, Weights & Biases.

In:   a step's number and its figures, on one rank.
Out:  files, or a run on a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from flatfsdp.comm.paths import local_path
from flatfsdp.profiling.step_time import to_json


class LogName(str, Enum):
    """Kinds of logs; those of libraries have the names of their packages."""

    jsonl = "jsonl"
    tensorboard = "tensorboard"
    wandb = "wandb"


class Log(Protocol):
    """Takes the figures of a run, step by step."""

    def write(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Writes the figures of one step; None is left out, or null."""

    def close(self) -> None:
        """Writes what is still buffered."""


class JSONLines:
    """Log of one line of JSON a step, in metrics.jsonl; a run that goes on adds to it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a")

    def write(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Writes one line, at once."""
        print(to_json({"step": step, **figures}), file=self._file, flush=True)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Log for `tensorboard --logdir`, in the folder tensorboard."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # From the first step on it hides what a run that was killed has written.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first)
        self._writer.add_text("settings", to_json(settings, indent=2))

    def write(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Adds a point to each figure's curve."""
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still buffered."""
        self._writer.close()


class WeightsAndBiases:
    """Log as a run of Weights & Biases; `WANDB_PROJECT` and `WANDB_MODE` decide where, as everywhere."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first: int | None) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # A run that crashed in this folder is the same run there when it goes on.
        self._run = wandb.init(dir=str(folder), config=dict(settings), resume="auto")

    def write(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Adds a point to each figure's curve."""
        self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)

    def close(self) -> None:
        """Ends the run, and sends what is still buffered."""
        self._run.finish()


_LOGS: dict[LogName, type[JSONLines] | type[TensorBoard] | type[WeightsAndBiases]] = {
    LogName.jsonl: JSONLines,
    LogName.tensorboard: TensorBoard,
    LogName.wandb: WeightsAndBiases,
}


def require_logs(names: Iterable[LogName | str]) -> None:
    """Checks that the libraries of these logs are installed; call it on every rank, before a process group.

    Raises:
        ModuleNotFoundError: if one is missing; the message says what to install.
        ValueError: for an unknown name.
    """
    for name in map(LogName, names):
        if name is not LogName.jsonl and find_spec(name.value) is None:
            raise ModuleNotFoundError(f"a log to {name.value} needs its package: pip install {name.value}")


def open_logs(
    names: Iterable[LogName | str],
    folder: Path | str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    first: int | None = None,
) -> list[Log]:
    """Opens logs, on the rank that writes them.

    Args:
        names: kinds of logs, each once.
        folder: folder of the run.
        settings: settings of the run, kept beside its figures; lines of JSON do not have them.
        first: number of the first step that is to be written.  A run that was killed may have written it, and
            further ones, before: TensorBoard hides those, lines of JSON stay, and Weights & Biases keeps them
            and drops the new ones.

    Raises:
        ModuleNotFoundError: if a library is missing.
        ValueError: if the folder is a URL; for an unknown name.
    """
    folder, kinds = local_path(folder), list(dict.fromkeys(map(LogName, names)))
    require_logs(kinds)
    return [_LOGS[kind](folder, settings, first) for kind in kinds]
