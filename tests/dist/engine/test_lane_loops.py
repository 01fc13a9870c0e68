"""Loops that tell only where a step ends, with one lane a rank: the bits of `microbatches` on any ranks."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Lanes, Precision, microbatches, replayed
from flatfsdp.fp8 import autocast
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import SHORT
from tests.support.fp8_training import batch as fp8_batch
from tests.support.fp8_training import build as build_fp8
from tests.support.lanes import ZERO2, assert_same_bits, differing, microbatch
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import build, update
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tape import taped

STEPS, TOTAL, LANES = 2, 12, Lanes(2)


def trained(rank: int, world_size: int, loop: str) -> dict[str, Tensor]:
    model = build(lanes=LANES)
    numbers = model.microbatch_numbers(TOTAL)
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
    assert_same_bits(run_ranks(1, trained, "microbatches")[0], 2, trained, loop)


def replaying(
    rank: int, world_size: int, lanes: Lanes, replays: bool, is_fp8: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """Weights and FP8 scales of a training whose microbatches may be replayed, and how many were."""
    with taped():
        model = (build_fp8 if is_fp8 else build)(lanes=lanes, **options)
        numbers = model.microbatch_numbers(TOTAL)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)

        def run(batch: Tensor) -> Tensor:
            with autocast(is_fp8, recipe=SHORT):
                loss: Tensor = model(batch).square().mean() if is_fp8 else model(batch)
            (loss / TOTAL).backward()
            return loss

        step = replayed(model, run)
        either = step if replays else run
        for number in range(7):
            batches = [(of_fp8 if is_fp8 else microbatch)(number, each) for each in numbers]
            if is_fp8 and number == 6:
                # Largest values of a loop that is left are none of the step's.
                for batch in microbatches(model, batches):
                    either(64 * batch)
                    break
            for batch in microbatches(model, batches):
                either(batch)
            update(optimizer)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return {**model.state_dict(), **buffers}, step.replays


def of_fp8(step: int, number: int) -> Tensor:
    return fp8_batch(number, step, 2.0 ** (number % 4))


@functools.cache
def eager(lanes: Lanes, is_fp8: bool) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = run_ranks(1, replaying, lanes, False, is_fp8, {})[0][0]
    return weights


@pytest.mark.parametrize(
    ("is_fp8", "lanes", "ranks", "options"),
    [
        (False, Lanes(2), 1, {}),
        (False, Lanes(12), 2, ZERO2),
        (False, Lanes(12, block=2), 4, HYBRID),
        (True, Lanes(2), 1, {}),
        (True, Lanes(2), 2, {}),
        (True, Lanes(12, block=6), 2, {}),
        (True, Lanes(12, block=2), 4, HYBRID),
        (True, Lanes(6), 3, REPLICATED),
    ],
    ids=str,
)
def test_replayed_lanes_have_the_bits_of_eager_ones(
    is_fp8: bool, lanes: Lanes, ranks: int, options: dict[str, Any]
) -> None:
    expected = eager(lanes, is_fp8)
    for weights, replays in run_ranks(ranks, replaying, lanes, True, is_fp8, options):
        # After some eager steps and one that records, all are replayed.
        assert replays >= 2 * TOTAL // ranks
        assert differing(weights, expected) == []


def test_a_sum_wider_than_the_gradient_has_memory_of_its_own() -> None:
    narrow = {"precision": Precision(param=torch.bfloat16)}
    expected, _ = run_ranks(1, replaying, Lanes(12), False, False, narrow)[0]
    for weights, replays in run_ranks(2, replaying, Lanes(12), True, False, narrow):
        assert replays >= TOTAL
        assert differing(weights, expected) == []


@on_ranks(1)
def test_several_lanes_a_rank_need_microbatches() -> None:
    model = build(lanes=LANES)
    words = r"2 lanes .* inside flatfsdp\.microbatches.* as no_sync\(\) and set_is_last_backward\(\) do not"
    with model.no_sync(), pytest.raises(RuntimeError, match=words):
        model(microbatch(0, 0))
    model.set_is_last_backward(False)
    with pytest.raises(RuntimeError, match=words):
        model(microbatch(0, 0))
