"""A job of two hosts goes on with one of them: two torchrun agents on this machine stand for the hosts."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.programs import Program, run_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_llama.py"
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "kv_heads": 1, "vocab": 256, "seq": 32}
STEPS, SAVE_EVERY = 40, 5
OPTIONS = (
    *("--lanes", "4", "--lane-block", "2", "--dp-shard", "2", "--dp-replicate", "-1", "--microbatches", "8"),
    *("--batch", "1", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--precision", "fp32"),
    *("--data", __file__, "--json"),
)
# Each rank has one thread: GEMMs on several add in another order.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def program(folder: Path) -> list[str]:
    folder.mkdir()
    config = folder / "sizes.json"
    config.write_text(json.dumps(SIZES))
    return [str(EXAMPLE), *OPTIONS, "--config", str(config), "--out", str(folder)]


def agent(port: int, holds_rendezvous: bool, command: Sequence[str]) -> Program:
    """torchrun as it is started on each host, but for short waits and `is_host`: both are "localhost"."""
    waits = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"{waits},is_host={int(holds_rendezvous)}"),
    )
    # Without it the ranks that start again read addresses of ranks that have ended.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Program("-m", "torch.distributed.run", *options, *command, **ON_CPUS, **own_store)


def steps_in(printed: str) -> list[dict[str, Any]]:
    """Reads whole lines: a rank that is killed may not get to the end of its last one."""
    return [json.loads(line) for line in printed.splitlines(keepends=True) if line.endswith("}\n")]


def figures(step: dict[str, Any]) -> tuple[float, float]:
    return step["loss"], step["grad_norm"]


def test_a_job_that_loses_a_host_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_program(*program(tmp_path / "whole"), ranks=4, **ON_CPUS)
    assert whole.returncode == 0, whole.stderr
    expected = {step["step"]: figures(step) for step in steps_in(whole.stdout)}
    assert list(expected) == list(range(1, STEPS + 1))

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = program(tmp_path / "hosts")
    hosts = [agent(port, holds_rendezvous, command) for holds_rendezvous in (True, False)]
    try:
        # The first rank is on either of them.
        while '{"step": 12,' not in hosts[0].printed()[0] + hosts[1].printed()[0]:
            assert all(host.is_alive() for host in hosts), [host.printed() for host in hosts]
            time.sleep(0.01)
        lost = hosts[1].kill()
        left = hosts[0].wait(timeout=120)
    finally:
        for host in hosts:
            host.kill()
    assert left.returncode == 0, left.stderr
    assert "has ended, or left a collective" in left.stderr
    steps = steps_in(lost) + steps_in(left.stdout)
    numbers = [step["step"] for step in steps]
    # Steps that were not saved are repeated by the two ranks that are left.
    ended = next((before for before, number in enumerate(numbers) if number != before + 1), STEPS)
    newest = ended - ended % SAVE_EVERY
    resumed = numbers[ended] - 1 if ended < STEPS else STEPS
    # A step is reported before it is saved, and the host may be lost in between.
    assert resumed in (newest, ended - SAVE_EVERY)
    assert numbers[ended:] == list(range(resumed + 1, STEPS + 1))
    assert [step for step in steps if figures(step) != expected[step["step"]]] == []
