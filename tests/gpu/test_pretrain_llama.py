"""What `examples/pretrain_llama.py` leaves behind of ranks that hang, or that have too little memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from tests.support.gpu.marks import one_gpu_each
from tests.support.programs import run_program

IMPORTS = """
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, "examples")
import pretrain_llama
from flatfsdp.comm.launch import Device

folder = Path(sys.argv[1])
"""
HANGS = """
pretrain_llama.timedelta = lambda seconds: timedelta(seconds=10)
device = pretrain_llama.start_ranks(Device.cuda, False, folder)
dist.all_reduce(torch.ones(3, device=device))
torch.cuda.synchronize()
if dist.get_rank() == 1:
    time.sleep(100)
dist.all_gather_into_tensor(torch.empty(14, device=device), torch.ones(7, device=device))
torch.cuda.synchronize()
"""
RUNS_OUT = """
with pretrain_llama.recorded_memory(folder / "memory-0.pickle", torch.device("cuda", 0)):
    kept = [torch.ones(1 << 20, device="cuda") for _ in range(5)]
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
"""


def run(folder: Path, text: str, ranks: int) -> Any:
    program = folder / "program.py"
    program.write_text(IMPORTS + text)
    done = run_program(program, folder / "left", ranks=ranks)
    assert done.returncode != 0, done.stdout
    return done


@one_gpu_each(2)
def test_the_flight_recorder_names_what_one_rank_waits_for(world_size: int, tmp_path: Path) -> None:
    done = run(tmp_path, HANGS, world_size)
    # Rank 1 may be ended while it writes its own.
    file = tmp_path / "left" / "rank-0"
    assert file.exists(), done.stderr
    last = pickle.loads(file.read_bytes())["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"]) == ("nccl:_all_gather_base", [[7]])
    assert last["state"] != "completed"


@one_gpu_each(1)
def test_a_snapshot_of_memory_is_written_after_an_error(world_size: int, tmp_path: Path) -> None:
    done = run(tmp_path, RUNS_OUT, ranks=0)
    assert "OutOfMemoryError" in done.stderr
    snapshot = pickle.loads((tmp_path / "left" / "memory-0.pickle").read_bytes())
    (events,) = [trace for trace in snapshot["device_traces"] if trace]
    actions = [event["action"] for event in events]
    assert actions.count("alloc") == 5 and "oom" in actions
    assert (
        sum(segment["allocated_size"] for segment in snapshot["segments"]) == 5 * torch.float32.itemsize << 20
    )
