"""Microbatches that are CUDA graphs: the bits of eager ones, over NCCL, whatever happens between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import microbatches, replayed
from flatfsdp.optim import AdamW
from tests.support.gpu.marks import FP8_GEMMS
from tests.support.ranks import on_ranks
from tests.support.replaying import CASES, EVENTS, Between, Case, batch, trained

pytestmark = [
    *FP8_GEMMS,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def compare(case: Case, rank: int, between: Between | None = None, steps: int = 10) -> None:
    device = f"cuda:{rank}"
    losses, state, _ = trained(case, rank, False, between, steps, device)
    found, found_state, step = trained(case, rank, True, between, steps, device)
    assert all(map(torch.equal, found, losses)) and len(found) == len(losses)
    assert all(map(torch.equal, found_state, state)) and len(found_state) == len(state)
    assert step.replays > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_ranks(2, backend="nccl")
def test_bits_are_those_of_eager_microbatches(rank: int, case: Case) -> None:
    compare(case, rank)


@pytest.mark.parametrize("event", EVENTS)
@on_ranks(2, backend="nccl")
def test_what_happens_between_steps(rank: int, event: str) -> None:
    compare(Case("", True, 3), rank, EVENTS[event])


def train(model: Any, step: Any, rank: int, steps: int) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for index in range(steps):
        for x in microbatches(model, [batch(rank, index, m, device=f"cuda:{rank}") for m in range(2)]):
            step(x)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, backend="nccl")
def test_what_no_graph_can_hold_raises_and_training_goes_on(rank: int) -> None:
    case, kept = Case("", True, 2), []
    model = case.model(f"cuda:{rank}")
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
        # The generator, too, is as after any failure.
        assert torch.rand(3, device="cuda").isfinite().all()


@on_ranks(2, backend="nccl")
def test_ranks_with_other_shapes_are_named(rank: int) -> None:
    case = Case("", True, 1)
    model = case.model(f"cuda:{rank}")
    step = replayed(model, case.microbatch(model))
    for index in range(5):
        step(batch(rank, index, 0, device=f"cuda:{rank}"))
        model.zero_grad()

    def differs() -> None:
        for tokens in (16, 16) if rank else (32, 32):
            step(batch(rank, 9, 0, tokens, f"cuda:{rank}"))
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match=r"ranks do not do the same.*replays a recorded microbatch"):
        differs()
