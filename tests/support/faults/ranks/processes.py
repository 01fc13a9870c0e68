"""Ranks as processes of their own, and how each of them ends.

In:   what each rank runs: a function that is importable by name, and its arguments.
Out:  an `Ending` for each rank; `judged` says what is wrong with them, if anything is.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.support.programs import forking

How = Literal["finished", "named", "backend's words", "own error", "as told", "aborted", "hung"]

WORDS = re.compile(
    r"ranks do not do the same|is not the same on all ranks|did not come within|had given up waiting|"
    r"(has|have) ended, or left a collective|and lost the other ranks|takes .*; build all|"
    r"was not saved: rank|ranks were given different paths"
)
"""What this project says of ranks that differ."""

GROUP_TIMEOUT = timedelta(seconds=25)
"""What a rank waits that nobody has told otherwise."""

LIMIT = 20.0
"""Seconds after which a rank hangs."""


@dataclass(frozen=True)
class Ending:
    """How a rank has ended.

    Attributes:
        seconds: since all ranks began.
        message: of the exception, if there was one.
        losses: until then.
    """

    how: How
    seconds: float
    message: str = ""
    losses: tuple[float, ...] = ()


POLL = 0.5
"""Seconds between two looks at ranks that may have been stopped."""


class Started:
    """Ranks that run by themselves until `endings` is asked for.

    Args:
        world_size: how many.
        function: what each of them calls, with its rank, `args`, and a list for its losses.
    """

    def __init__(self, world_size: int, function: Callable[..., None], *args: Any) -> None:
        context = forking()
        self._folder = tempfile.TemporaryDirectory(prefix="flatfsdp-faults-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (theirs, f"{self._folder.name}/store", rank, world_size, function, args)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._start = time.monotonic()

    def endings(self, limit: float = LIMIT) -> list[Ending]:
        """How each rank has ended.

        Args:
            limit: seconds that they have.
        """
        with self._folder:
            found = dict[int, Ending]()
            while True:
                # Those that have ended are heard also where the limit was over before they were asked.
                is_over = time.monotonic() - self._start >= limit
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
                if all(_is_stopped(self._processes[self._pipes.index(pipe)].pid) for pipe in waiting):
                    break
                for pipe in wait(waiting, 0.0 if is_over else POLL):
                    rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                    found[rank] = self._ending(rank)
                if is_over:
                    break
            for rank, process in enumerate(self._processes):
                if rank not in found:
                    how: How = "as told" if _is_stopped(process.pid) else "hung"
                    found[rank] = Ending(how, time.monotonic() - self._start)
                process.kill()
                process.join()
        return [found[rank] for rank in range(len(self._processes))]

    def _ending(self, rank: int) -> Ending:
        """How a rank has ended that says so, or has died."""
        seconds = time.monotonic() - self._start
        try:
            how, message, losses = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            told = code in (0, -signal.SIGKILL)
            return Ending("as told" if told else "aborted", seconds, f"exit code {code}")
        return Ending(how, seconds, message, losses)


def _is_stopped(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended


def _serve(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # Warnings, and what the engine logs of failed steps, are expected here by the dozen.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    dist.distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
    losses: list[float] = []
    how: How = "finished"
    message = ""
    try:
        function(rank, *args, losses)
    except BaseException as error:
        how, message = _kind_of(error), "".join(traceback.format_exception_only(error))
    pipe.send((how, message, tuple(losses)))
    with suppress(RuntimeError):
        dist.destroy_process_group()


def _kind_of(error: BaseException) -> How:
    if WORDS.search(str(error)):
        return "named"
    return "backend's words" if "gloo" in str(error) else "own error"


Verdict = Literal["right", "named", "silent", "false alarm", "unnamed", "hung", "aborted", "backend's words"]

TOLERANCE = 1e-4


def judged(
    found: Sequence[Ending],
    odd: int,
    expected: Sequence[Sequence[float]] | None = None,
    counts: Sequence[int] | None = None,
) -> Verdict:
    """The worst of what these ranks have come to.

    Args:
        odd: the rank that does something else; it alone may end by an error of its own, or be ended.
        expected: losses of each rank, as far as they are known; None if all that end are wrong.
        counts: how many losses each rank has that ends.
    """
    for verdict in ("hung", "aborted", "backend's words"):
        if any(each.how == verdict for each in found):
            return verdict  # type: ignore[return-value]
    others = [each for rank, each in enumerate(found) if rank != odd]
    if any(each.how == "as told" for each in others):
        return "aborted"
    if any(each.how == "own error" for each in others):
        return "unnamed"
    for rank, each in enumerate(found):
        right = expected[rank] if expected else ()
        if not all(map(_is_near, each.losses, right)):
            return "silent"
        if counts is not None and each.how == "finished" and len(each.losses) != counts[rank]:
            return "silent"
    if any(each.how == "named" for each in found):
        return "named"
    return "silent" if expected is None else "right"


def _is_near(loss: float, right: float) -> bool:
    return abs(loss - right) <= TOLERANCE * max(1.0, abs(right))
