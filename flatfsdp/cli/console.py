"""Terminal helpers that all commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


@contextmanager
def usage_errors() -> Iterator[None]:
    """Context that turns invalid settings into a message and exit code 2, without traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def reported_failures() -> Iterator[None]:
    """Context that turns a rank's failure into its traceback on stderr and exit code 1."""
    try:
        yield
    except (ProcessRaisedException, ProcessExitedException) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def results_console() -> Console:
    """Makes a console on stdout; a pipe or a log has no width, and gets one that fits the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def given(context: typer.Context) -> dict[str, Any]:
    """Options that are given on the command line, without those left to their defaults."""
    return {
        name: value
        for name, value in context.params.items()
        # Compared by name, as typer may bring a click of its own.
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


class StepBar(Progress):
    """Progress bar on stderr, to be used as a context; with `visible=False` (every rank but one) nothing.

    Without a terminal it is written once, at the end, as a log of the run.
    """

    def __init__(self, label: str, steps: int, visible: bool) -> None:
        super().__init__(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not visible,
        )
        self.steps = self.add_task(label, total=steps, note="")

    def show(self, loss: float) -> None:
        """Shows that one step has ended, with its loss."""
        self.update(self.steps, advance=1, note=f"loss {loss:.4f}")

    def conclude(self, equal: bool) -> None:
        """Replaces the last note by the result of the steps."""
        self.update(self.steps, note="equal" if equal else "DIFFER")
