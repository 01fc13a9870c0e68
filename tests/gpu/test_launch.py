"""Ranks that are forked can use their GPU, whatever the process they come from has imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = """
import torch

import flatfsdp.compat.transformers.trainer  # asks at import whether there is a GPU
from flatfsdp.comm.launch import Device, Launch, Rank, run_on_ranks


def name_of_device(rank: Rank, payload: None) -> str:
    return str(torch.ones(1, device=rank.device).device)


if __name__ == "__main__":
    print(run_on_ranks(name_of_device, None, Launch(1, Device.cuda)))
"""


def test_beside_libraries_that_ask_for_gpus(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert run.stdout.strip() == "cuda:0", run.stderr
