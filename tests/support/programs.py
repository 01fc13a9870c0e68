"""Runs Python programs as a user does, but for the seconds in which an interpreter imports torch."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

from flatfsdp.launch import fork_server

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""Before a program: two ranks, each with an interpreter of its own."""

PRELOAD = ("flatfsdp.cli.app",)
"""Modules that nearly all programs need; this brings rich and matplotlib, too."""


def run_program(*command: str | Path, timeout: float = 240.0, **environment: str) -> CompletedProcess[str]:
    """`python *command` in the root of the repository, in a process of its own, forked from the fork server.

    Args:
        command: a script or `-m` and a module, and its arguments.
        timeout: seconds.
        environment: variables to set.

    Raises:
        TimeoutError: if it takes longer.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = fork_server(PRELOAD).Process(target=_run, args=(words, environment, outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            # Not at once with SIGKILL: torchrun ends its ranks first.
            process.terminate()
            process.join(45)
            process.kill()
            process.join()
            printed = "".join(output.read_text() for output in outputs)
            raise TimeoutError(f"{words} takes longer than {timeout:.0f} s; it has printed:\n{printed}")
        return CompletedProcess(words, process.exitcode, *(output.read_text() for output in outputs))


def _run(command: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    os.chdir(ROOT)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        _run_script(Path(command[0]).resolve())


def _run_script(path: Path) -> None:
    """As `runpy.run_path`; and what its ranks send, whose classes are of `__mp_main__`, can be read here."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), path, "exec"), vars(main))
