"""Runs Python programs as a user does, but for the seconds in which an interpreter imports torch."""

from __future__ import annotations

import gc
import json
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore

from flatfsdp.comm.launch import fork_server

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""Before a program: two ranks, each with an interpreter of its own; `run_program(ranks=2)` is quicker."""

PRELOAD = ("flatfsdp.cli.app", "matplotlib.figure")
"""Modules that nearly all programs need; the first brings rich, too."""
ECOSYSTEM = ("transformers.models.llama.modeling_llama", "transformers.trainer_callback")
"""Most of what tests of the ecosystem need, without pyarrow, which starts a thread."""


def forking() -> ForkServerContext:
    """The context that starts all ranks and programs of tests.

    Its server imports what they need once, where each of them would take seconds.
    """
    uses_ecosystem = any(name.startswith("tests.ecosystem.") for name in sys.modules)
    # On a GPU its libraries might start CUDA, and a process that has done so must not fork.
    return fork_server((*PRELOAD, *(ECOSYSTEM if uses_ecosystem and not torch.cuda.is_available() else ())))


class Program:
    """`python *command` in the root of the repository, in a process of its own, forked from the fork server.

    Args:
        command: a script or `-m` and a module, and its arguments.
        ranks: as many such processes, with the environment that torchrun gives its ranks; what they print
            comes rank by rank.  As soon as one fails the others are ended.
        environment: variables to set.
    """

    def __init__(self, *command: str | Path, ranks: int = 0, **environment: str) -> None:
        self._words = [str(word) for word in command]
        # As torchrun's agent does: all ranks are its clients.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
        environments = [environment]
        if self._store is not None:
            port = self._store.port
            environments = [{**_of_rank(rank, ranks, port), **environment} for rank in range(ranks)]
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [
            [Path(self._folder.name, f"{rank}-{name}") for rank in range(len(environments))]
            for name in ("stdout", "stderr")
        ]
        self._processes = []
        for variables, *paths in zip(environments, *self._outputs, strict=True):
            arguments = (self._words, variables, paths)
            self._processes.append(forking().Process(target=_run, args=arguments))
            self._processes[-1].start()

    def printed(self) -> tuple[str, str]:
        """Stdout and stderr until now."""
        stdout, stderr = (
            "".join(path.read_text() for path in paths if path.exists()) for paths in self._outputs
        )
        return stdout, stderr

    def is_alive(self) -> bool:
        """Whether none of its processes has ended."""
        return all(process.is_alive() for process in self._processes)

    def wait(self, timeout: float) -> CompletedProcess[str]:
        """Waits for its end.

        Raises:
            TimeoutError: if it takes longer.
        """
        with self._folder:
            in_time = _join(self._processes, timeout)
            stdout, stderr = self.printed()
            if not in_time:
                raise TimeoutError(
                    f"{self._words} takes longer than {timeout:.0f} s; it has printed:\n{stdout}{stderr}"
                )
            code = next((process.exitcode for process in self._processes if process.exitcode), 0)
            return CompletedProcess(self._words, code, stdout, stderr)

    def kill(self) -> str:
        """Kills it and its ranks at once, also those that torchrun has started; returns its stdout."""
        with self._folder:
            for process in self._processes:
                children = _children_of(process)
                process.kill()
                for child in children:
                    os.kill(child, signal.SIGKILL)
            for process in self._processes:
                process.join()
            return self.printed()[0]


def run_program(
    *command: str | Path, timeout: float = 240.0, ranks: int = 0, **environment: str
) -> CompletedProcess[str]:
    """Runs a `Program` to its end, and no longer than `timeout` seconds.

    Raises:
        TimeoutError: if it takes longer.
    """
    return Program(*command, ranks=ranks, **environment).wait(timeout)


def run_benchmark(name: str, out: Path, *options: str | Path, ranks: int = 0) -> tuple[str, Any, str]:
    """Runs `benchmarks/<name>.py` on CPUs until it has written its results and a figure.

    Args:
        name: name of the script.
        out: folder of the results, empty.
        options: options of the command.
        ranks: number of ranks that already exist.

    Returns:
        The name of the file of results, its content, and what was printed, which is the same with `--json`.
    """
    command = (f"benchmarks/{name}.py", "--device", "cpu", "--out", out, *options)
    done = run_program(*command, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = out.glob("*.json")
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    payload = json.loads(written.read_text())
    if "--json" in options:
        printed = json.loads(done.stdout)
        # With several shapes it is a list.
        assert printed in (payload, [payload]), "--json prints something else, or something more"
    return written.stem, payload, done.stdout


def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment that torchrun gives a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(value) for name, value in {**numbers, **master, **elastic}.items()}


def _children_of(process: ForkServerProcess) -> list[int]:
    """Processes that it has started and that are still there."""
    try:
        return [
            int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def _join(processes: Sequence[ForkServerProcess], timeout: float) -> bool:
    """Waits until all have ended, or one has failed; ends the others.  False if they took longer."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        if not wait([process.sentinel for process in running], deadline - time.monotonic()):
            break
        running = [process for process in running if process.exitcode is None]
    in_time = not running or any(process.exitcode for process in processes)
    for process in running:
        # Not at once with SIGKILL: torchrun ends its ranks first.
        process.terminate()
    for process in running:
        process.join(45)
        process.kill()
        process.join()
    return in_time


def _run(command: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    # Collections of garbage need not look at what the fork server has imported.
    gc.freeze()
    _print_to(outputs)
    os.environ.update(environment)
    os.chdir(ROOT)
    _share_fork_server(outputs)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        _run_script(Path(command[0]).resolve())


def _print_to(outputs: Sequence[Path]) -> None:
    """Makes these files this process's stdout and stderr, to which other processes may print, too."""
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


class _Rank(ForkServerProcess):
    """A rank of a program, which prints where the program does, not where the fork server does."""

    def __init__(self, outputs: Sequence[Path], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outputs = outputs

    def run(self) -> None:
        _print_to(self._outputs)
        super().run()


def _share_fork_server(outputs: Sequence[Path]) -> None:
    """Ranks that the program starts are forked from the server that has forked the program.

    multiprocessing would start another one, which imports torch once more: three seconds a program.
    """
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is not None:
        server.ensure_running = lambda: None
        ForkServerContext.Process = partial(_Rank, outputs)  # type: ignore[assignment,misc]


def _run_script(path: Path) -> None:
    """Runs a script like `runpy.run_path`, so that results of classes of `__mp_main__` can be read here."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), path, "exec"), vars(main))
