"""Starting ranks from the command line: results come back, a failing rank ends all of them."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from flatfsdp.cli.app import app
from flatfsdp.comm.launch import Device, Launch, Rank, run_on_ranks


def add_up(rank: Rank, payload: float) -> tuple[int, float, bool]:
    total = torch.tensor(payload * (rank.index + 1))
    dist.all_reduce(total)
    return rank.world, total.item(), torch.are_deterministic_algorithms_enabled()


def about_the_fork_server(rank: Rank, payload: object) -> tuple[int, bool]:
    return len(os.listdir(f"/proc/{os.getppid()}/task")), "flatfsdp.cli.verify" in sys.modules


def fail_on_rank_1(rank: Rank, payload: object) -> None:
    if rank.index == 1:
        raise RuntimeError("on purpose")
    dist.barrier()  # waits for rank 1, which never comes


def test_result_of_rank_0_comes_back() -> None:
    launch = Launch(2, Device.cpu, deterministic=True)
    assert run_on_ranks(add_up, 10.0, launch) == (2, 30.0, True)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_ranks_are_forks_of_a_process_with_one_thread_that_has_imported_what_they_need() -> None:
    assert run_on_ranks(about_the_fork_server, None, Launch(1, Device.cpu)) == (1, True)


def test_a_failing_rank_ends_all_with_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flatfsdp.cli.verify.rows_on_rank", fail_on_rank_1)
    start = time.monotonic()
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "in fail_on_rank_1" in result.output
    assert "RuntimeError: on purpose" in result.output
    assert time.monotonic() - start < 60


def test_ranks_must_agree_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Launch().world == 4
    with pytest.raises(ValueError, match="torchrun has started 4"):
        Launch(ranks=2)
