"""What commands do alike at the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console


@contextmanager
def usage_errors() -> Iterator[None]:
    """What a configuration refuses is the user's to mend: a message and exit code 2, no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def results_console() -> Console:
    """stdout; a pipe or a log has no width, and gets one that fits the table."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def given(context: typer.Context) -> dict[str, Any]:
    """The options that are on the command line, not left to their defaults."""
    return {
        name: value
        for name, value in context.params.items()
        # By name, as typer may bring a click of its own.
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
