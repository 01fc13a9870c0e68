"""Programs that tests start: as ranks they are told what torchrun tells, and none outlives one that fails."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_program

SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(10 ** dist.get_rank())
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""
ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(100)
"""


def test_ranks_meet(tmp_path: Path) -> None:
    program = tmp_path / "sums.py"
    program.write_text(SUMS)
    done = run_program(program, ranks=3)
    assert (done.returncode, done.stdout) == (0, "111\n" * 3), done.stderr


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(ONE_FAILS)
    assert run_program(program, ranks=2, timeout=60.0).returncode != 0
