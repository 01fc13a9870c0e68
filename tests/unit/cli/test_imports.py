"""The command line stands on the library, and the library runs without it and without what it draws with."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT

PRESENTATION = ("rich", "typer", "matplotlib")
CORE = (
    *("flatfsdp", "flatfsdp.layers", "flatfsdp.checkpoint", "flatfsdp.parallel", "flatfsdp.plan"),
    *("flatfsdp.models", "flatfsdp.comm.launch", "flatfsdp.profiling.trace", "flatfsdp.profiling.timeline"),
    *("flatfsdp.training.gpt", "flatfsdp.training.llama"),
)
OUTSIDE = [
    path.relative_to(ROOT)
    for folder in ("flatfsdp", "kernels", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "cli" not in path.parts and path.name != "__main__.py"
]


def python(*command: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that has imported nothing yet."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_core_imports_nothing_that_draws() -> None:
    found = f"[name for name in {PRESENTATION} if name in sys.modules]"
    done = python("-c", f"import sys, {', '.join(CORE)}; print({found})")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def command_line_without(missing: str, *words: str) -> subprocess.CompletedProcess[str]:
    start = "runpy.run_module('flatfsdp', run_name='__main__', alter_sys=True)"
    return python("-c", f"import runpy, sys; sys.modules[{missing!r}] = None; {start}", *words)


def test_layers_do_not_import_the_compiler() -> None:
    """It takes twice as long as all of the library; the first training step imports it."""
    done = python("-c", "import sys, flatfsdp.layers; print('torch._dynamo' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("missing", "command"),
    [("rich", "plan"), ("typer", "plan"), ("matplotlib", "train"), ("matplotlib", "verify")],
)
def test_the_command_line_says_what_to_install(missing: str, command: str) -> None:
    """Before it trains, not when it comes to draw."""
    done = command_line_without(missing, command)
    assert done.returncode == 1
    assert f"the command line needs {missing}" in done.stderr
    assert done.stderr.endswith("run: pip install 'flatfsdp[cli]'\n")


def test_commands_that_draw_nothing_run_without_matplotlib() -> None:
    """Importing it takes as long as all of the library."""
    done = python("-c", "import sys, flatfsdp.cli.app; print('matplotlib' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    done = command_line_without("matplotlib", "plan", "--preset", "8b", "--gpus", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_nothing_outside_imports_the_command_line() -> None:
    assert len(OUTSIDE) > 100
    for path in OUTSIDE:
        assert not [name for name in imported(ROOT / path) if f"{name}.".startswith("flatfsdp.cli.")], path
