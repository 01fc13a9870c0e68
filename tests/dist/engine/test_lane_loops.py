"""Loops that tell only where a step ends, with one lane a rank: the bits of `microbatches` on any ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from flatfsdp import microbatches, replayed
from flatfsdp.comm.lanes import Lanes
from tests.support.models import VOCAB, build, update
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tape import taped

STEPS, TOTAL, LANES = 3, 12, Lanes(2)


def microbatch(step: int, number: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(100 * step + number))


def trained(rank: int, world_size: int, loop: str) -> dict[str, Tensor]:
    model = build(lanes=LANES)
    numbers = LANES.microbatches(model.fsdp_state.grid, TOTAL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batches = [microbatch(step, number) for number in numbers]
        for place, batch in enumerate(microbatches(model, batches) if loop == "microbatches" else batches):
            is_last = place == len(batches) - 1
            if loop == "set_is_last_backward":
                model.set_is_last_backward(is_last)
            with model.no_sync() if loop == "no_sync" and not is_last else nullcontext():
                (model(batch) / TOTAL).backward()
        update(optimizer)
    return model.state_dict()


@pytest.mark.parametrize("loop", ["no_sync", "set_is_last_backward"])
def test_one_lane_a_rank(loop: str) -> None:
    expected = run_ranks(1, trained, "microbatches")[0]
    for weights in run_ranks(2, trained, loop):
        assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []


def replaying(rank: int, world_size: int) -> tuple[dict[str, Tensor], int]:
    """Weights of a training whose microbatches may be replayed, and how many were."""
    with taped():
        model = build(lanes=LANES)
        numbers = LANES.microbatches(model.fsdp_state.grid, TOTAL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def run(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch) / TOTAL
            loss.backward()
            return loss

        step = replayed(model, run)
        for number in range(STEPS):
            for batch in microbatches(model, [microbatch(number, each) for each in numbers]):
                step(batch)
            update(optimizer)
        return model.state_dict(), step.replays


def test_microbatches_are_replayed_with_one_lane_a_rank() -> None:
    """A recording knows no other turn, so with several they are eager."""
    expected = run_ranks(1, trained, "microbatches")[0]
    for ranks in (1, 2):
        for weights, replays in run_ranks(ranks, replaying):
            assert (replays > 0) == (ranks == LANES.number)
            assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []


@on_ranks(1)
def test_several_lanes_a_rank_need_microbatches() -> None:
    model = build(lanes=LANES)
    words = r"2 lanes .* inside flatfsdp\.microbatches.* as no_sync\(\) and set_is_last_backward\(\) do not"
    with model.no_sync(), pytest.raises(RuntimeError, match=words):
        model(microbatch(0, 0))
    model.set_is_last_backward(False)
    with pytest.raises(RuntimeError, match=words):
        model(microbatch(0, 0))
