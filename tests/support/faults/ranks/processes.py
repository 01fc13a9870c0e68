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

from flatfsdp.comm.launch import fork_server

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


def endings(world_size: int, function: Callable[..., None], *args: Any, limit: float = LIMIT) -> list[Ending]:
    """Calls `function(rank, *args, losses)` on each of these ranks.

    Args:
        limit: seconds that they have.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="flatfsdp-faults-") as folder:
        ours: list[Connection] = []
        processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (theirs, f"{folder}/store", rank, world_size, function, args)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ours.append(mine)
            processes.append(process)
        start, found = time.monotonic(), dict[int, Ending]()
        while time.monotonic() - start < limit:
            waiting = [pipe for rank, pipe in enumerate(ours) if rank not in found]
            if all(_is_stopped(processes[ours.index(pipe)].pid) for pipe in waiting):
                break
            for pipe in wait(waiting, POLL):
                rank = ours.index(pipe)  # type: ignore[arg-type]
                seconds = time.monotonic() - start
                try:
                    how, message, losses = pipe.recv()  # type: ignore[union-attr]
                    found[rank] = Ending(how, seconds, message, losses)
                except (EOFError, ConnectionError):
                    processes[rank].join()
                    code = processes[rank].exitcode
                    told = code in (0, -signal.SIGKILL)
                    found[rank] = Ending("as told" if told else "aborted", seconds, f"exit code {code}")
        for rank, process in enumerate(processes):
            if rank not in found:
                is_stopped = _is_stopped(process.pid)
                found[rank] = Ending("as told" if is_stopped else "hung", time.monotonic() - start)
            process.kill()
            process.join()
    return [found[rank] for rank in range(world_size)]


def _is_stopped(pid: int | None) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


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
