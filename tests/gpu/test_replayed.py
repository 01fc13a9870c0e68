"""Microbatches as CUDA graphs: bit-equal to eager ones, over NCCL, whatever happens between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatfsdp import microbatches, replayed
from flatfsdp.optim import AdamW
from tests.support.ecosystem.families import needs_transformers
from tests.support.gpu.marks import FP8_GEMMS
from tests.support.ranks import on_ranks
from tests.support.replaying.cases import CASES, HUGGING_FACE, ON_GPUS, Case, batch, hybrid
from tests.support.replaying.steps import EVENTS, Step, evaluation, steps_of, trained

pytestmark = FP8_GEMMS


def device_of_rank() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def compare(case: Case, rank: int, steps: list[Step]) -> None:
    device = device_of_rank()
    expected = trained(case, rank, False, steps, device)
    found = trained(case, rank, True, steps, device)
    assert found.has_bits_of(expected)
    assert found.step.replays > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_ranks(1, 2, 4, backend="nccl", timeout=240.0)
def test_bits_are_those_of_eager_microbatches(rank: int, case: Case) -> None:
    compare(case, rank, steps_of(case, steps=20))


@pytest.mark.parametrize("case", ON_GPUS, ids=lambda case: case.name)
@on_ranks(2, backend="nccl", timeout=240.0)
def test_blocks_that_are_compiled_or_recomputed(rank: int, case: Case) -> None:
    compare(case, rank, steps_of(case, steps=20))


@on_ranks(4, backend="nccl", timeout=240.0)
def test_hybrid_sharding(rank: int) -> None:
    case = Case("hybrid", True, 3, spread=hybrid)
    compare(case, rank, steps_of(case, steps=12))


@needs_transformers
@pytest.mark.parametrize("case", HUGGING_FACE, ids=lambda case: case.name)
@on_ranks(2, backend="nccl", timeout=240.0, patience=120.0)
def test_hugging_face_models(rank: int, case: Case) -> None:
    compare(case, rank, steps_of(case, evaluation, steps=20))


@pytest.mark.parametrize("event", EVENTS)
@on_ranks(2, backend="nccl")
def test_what_happens_between_steps(rank: int, event: str) -> None:
    case = Case("", True, 3)
    compare(case, rank, steps_of(case, EVENTS[event], steps=12))


PROGRAM = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import destroy_process_group
from flatfsdp import FlatFSDP, microbatches, replayed
from flatfsdp.comm.launch import take_gpu
take_gpu(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = FlatFSDP(torch.nn.Linear(64, 64).cuda(), optimize_backward_concat=True)
step = replayed(model, lambda x: model(x).square().mean().backward())
for _ in range(6):
    for x in microbatches(model, [torch.randn(8, 64, device="cuda")] * 2):
        step(x)
    model.zero_grad()
assert step.replays > 2
if "destroy" in sys.argv:
    destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_program_ends_whose_recordings_are_still_there(tmp_path: Path, end: str) -> None:
    """NCCL waits for graphs that launch its collectives."""
    (tmp_path / "program.py").write_text(PROGRAM)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*run, str(tmp_path / "program.py"), end], check=True, timeout=90)


def train(model: Any, step: Any, rank: int, steps: int) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for index in range(steps):
        for x in microbatches(model, [batch(rank, index, m, device=device_of_rank()) for m in range(2)]):
            step(x)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, backend="nccl")
def test_what_no_graph_can_hold_raises_and_training_goes_on(rank: int) -> None:
    case, kept = Case("", True, 2), []
    model = case.model(device_of_rank())
    run = case.microbatch(model)

    def reads(x: torch.Tensor) -> float:
        return run(x).item()

    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(run(x))
        return kept[-1]

    for function, words in ((reads, "cannot be recorded as a CUDA graph"), (keeps, "are still there")):
        with pytest.raises(RuntimeError, match=words):
            train(model, replayed(model, function), rank, 5)
        train(model, run, rank, 2)
        # The generator has recovered, too, as after any failure.
        assert torch.rand(3, device="cuda").isfinite().all()


@on_ranks(2, backend="nccl")
def test_ranks_with_other_shapes_are_named(rank: int) -> None:
    case = Case("", True, 1)
    model = case.model(device_of_rank())
    step = replayed(model, case.microbatch(model))
    for index in range(5):
        step(batch(rank, index, 0, device=device_of_rank()))
        model.zero_grad()

    def differs() -> None:
        for tokens in (16, 16) if rank else (32, 32):
            step(batch(rank, 9, 0, tokens, device_of_rank()))
            torch.cuda.synchronize()

    # NCCL mixes what meets there, so the other rank's number may have arrived as bytes of something else.
    with pytest.raises(RuntimeError, match="ranks do not do the same"):
        differs()
