"""The command `plan`, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from flatfsdp.cli.app import app


def run(*options: str | Path) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, options)], env={"COLUMNS": "200"})


def check_refused(message: str, *options: str | Path) -> None:
    """Asserts that it ends with 2, and says so in the box that typer draws around errors."""
    result = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
