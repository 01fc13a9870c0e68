"""Two torchrun agents on this machine stand for two hosts; one of them is lost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.programs import Program

# Each rank has one thread: GEMMs on several add in another order.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_with_a_loss(command: Sequence[str | Path], step: int, ranks: int) -> tuple[list[dict[str, Any]], str]:
    """Runs a program on both hosts, kills the one that does not hold the rendezvous, and waits for the other.

    Args:
        command: the program, whose first rank prints a line of JSON with "step" for each step.
        step: the host is killed when a line with this step is there.
        ranks: number of ranks on each host.

    Returns:
        All lines that were printed, in their order, of which those after the loss may repeat steps; and
        what the host that is left has written to stderr.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = [_agent(port, holds_rendezvous, ranks, command) for holds_rendezvous in (True, False)]
    try:
        # The first rank is on either of them.
        while f'{{"step": {step},' not in hosts[0].printed()[0] + hosts[1].printed()[0]:
            assert all(host.is_alive() for host in hosts), [host.printed() for host in hosts]
            time.sleep(0.05)
        lost = hosts[1].kill()
        left = hosts[0].wait(timeout=120)
    finally:
        for host in hosts:
            host.kill()
    assert left.returncode == 0, left.stderr
    return lines_of(lost) + lines_of(left.stdout), left.stderr


def require_resumed(steps: Sequence[int], count: int, save_every: int) -> None:
    """Checks that steps go on from a checkpoint once, and that none is left out.

    Args:
        steps: numbers of the steps that were printed.
        count: number of steps of the whole run.
        save_every: steps from one checkpoint to the next.
    """
    ended = next((before for before, number in enumerate(steps) if number != before + 1), count)
    resumed = steps[ended] - 1 if ended < count else count
    newest = ended - ended % save_every
    # A step is reported before it is saved, and the host may be lost in between.
    assert resumed in (newest, ended - save_every), (steps, ended)
    assert list(steps[ended:]) == list(range(resumed + 1, count + 1))


def lines_of(printed: str) -> list[dict[str, Any]]:
    """Reads lines of JSON that are whole: a rank that is killed may not get to the end of its last one."""
    lines = printed.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"') and line.endswith("}\n")]


def _agent(port: int, holds_rendezvous: bool, ranks: int, command: Sequence[str | Path]) -> Program:
    """torchrun as it is started on each host, but for short waits and `is_host`: both are "localhost"."""
    waits = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", str(ranks), "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"{waits},is_host={int(holds_rendezvous)}"),
    )
    # Without it the ranks that start again read addresses of ranks that have ended.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Program("-m", "torch.distributed.run", *options, *command, **ON_CPUS, **own_store)
