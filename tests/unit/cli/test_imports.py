"""The command line stands on the library, and the library runs without it and without what it draws with."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.programs import ROOT

PRESENTATION = ("rich", "typer", "matplotlib")
CORE = (
    *("flatfsdp", "flatfsdp.layers", "flatfsdp.checkpoint", "flatfsdp.parallel", "flatfsdp.plan"),
    *("flatfsdp.models", "flatfsdp.comm.launch", "flatfsdp.profiling"),
    "flatfsdp.training.jobs",
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


def test_what_imports_leave_out() -> None:
    """Layers, the compiler, which takes twice as long as all of the library and which the first training step
    imports; the core, all that draws; the command line, matplotlib."""
    steps = (
        (("flatfsdp.layers",), ("torch._dynamo",)),
        (CORE, PRESENTATION),
        (("flatfsdp.cli.app",), ("matplotlib",)),
    )
    code = "import sys"
    for imports, absent in steps:
        code += f"; import {', '.join(imports)}; print([name for name in {absent} if name in sys.modules])"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, 3 * "[]\n"), done.stderr


WITHOUT = """
import gc, os, runpy, sys
import %s
# Else each process takes apart what it never used, a second long.
gc.freeze()
for missing, *words in %r:
    if os.fork() == 0:
        # As an interpreter of its own, but for the seconds in which that imports the library.
        sys.modules[missing] = None
        sys.argv[1:] = words
        runpy.run_module("flatfsdp", run_name="__main__", alter_sys=True)
        sys.exit(0)
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def command_lines_without(*cases: tuple[str, ...]) -> tuple[str, list[str]]:
    """What is printed, and what each case says of itself, ending in its exit code.

    Args:
        cases: a module that is missing, and the words of a command.
    """
    done = python("-c", WITHOUT % (", ".join(CORE), cases))
    assert done.returncode == 0, done.stderr
    said = re.split(r"(?<=exit code \d)\n", done.stderr)
    assert len(said) == len(cases) + 1, done.stderr
    return done.stdout, said[:-1]


def test_the_command_line_without_what_it_stands_on() -> None:
    """It says what to install before it trains, not when it comes to draw.

    Commands that draw nothing run without matplotlib, which takes as long to import as all of the library.
    """
    needs = (("rich", "plan"), ("typer", "plan"), ("matplotlib", "verify"))
    draws_nothing = ("matplotlib", "plan", "--preset", "8b", "--gpus", "4", "--json")
    stdout, said = command_lines_without(*needs, draws_nothing)
    for (missing, _), words in zip(needs, said, strict=False):
        assert f"the command line needs {missing}" in words
        assert words.endswith("run: pip install 'flatfsdp[cli]'\nexit code 1")
    assert said[-1].endswith("exit code 0"), said
    # Nothing else has printed.
    assert json.loads(stdout)["fits"] is True


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
