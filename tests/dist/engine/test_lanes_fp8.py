"""With lanes, FP8 layers have the bits of one rank, too: delayed scaling makes scales once a step."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import Precision, by_class, fp8, microbatches, shard
from flatfsdp.comm.lanes import Lanes
from flatfsdp.fp8 import BlockScaling, CurrentScaling, autocast
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import (
    SHORT,
    TOKENS,
    WIDTH,
    Block,
    Stack,
    counted_updates,
    fp8_state,
    seeded,
    snapshot,
)
from tests.support.lanes import assert_same_bits, differing
from tests.support.models import update
from tests.support.ranks import on_ranks, run_ranks

STEPS, LANES = 3, Lanes(12)
# More rows than steps: none is rolled out.
DELAYED = replace(SHORT, amax_history_len=STEPS + 3)
STORED = Precision(fp8_weights=CurrentScaling())


def batch(step: int, number: int) -> Tensor:
    """Inputs of one microbatch.  They differ in size, so that another order or number of updates shows."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(TOKENS, WIDTH, generator=generator) * 2.0 ** (step + number % 5)


def build(lanes: Lanes | None = LANES, **options: Any) -> Any:
    make = partial(Stack, **({"call": fp8.checkpoint} if options.pop("recompute", False) else {}))
    return shard(seeded(make), by_class(Block), lanes=lanes, **options)


def run_step(
    model: Any, batches: list[Tensor], recipe: Any = DELAYED, around: str = "forward", caches: bool = False
) -> None:
    """Forwards and backwards of a step; with `caches`, layers keep their cast weights.

    Args:
        around: what the region is around: "forward", "microbatch" or "step".
    """
    region = partial(autocast, recipe=recipe)
    with region() if around == "step" else nullcontext():
        for index, x in enumerate(microbatches(model, batches)):
            with region() if around == "microbatch" else nullcontext():
                with region() if around == "forward" else nullcontext():
                    loss = model(x, index == 0 if caches else None).square().mean() / 12
                loss.backward()


def trained(
    rank: int, world_size: int, recipe: Any, options: dict[str, Any], way: dict[str, Any], total: int = 12
) -> dict[str, Tensor]:
    """Whole weights, scales and histories after some steps.

    Args:
        options: of the model.
        way: that of `run_step`.
        total: number of microbatches of a step.
    """
    model = build(**options)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    numbers = model.microbatch_numbers(total)
    for step in range(STEPS):
        run_step(model, [batch(step, number) for number in numbers], recipe, **way)
        update(optimizer)
    return snapshot(model)


RANKS = {"delayed": (2, 3, 4), "delayed, weights in FP8": (4,), "current": (3,), "block": (4,)}
"""Others have two."""
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "delayed": (DELAYED, {}),
    "delayed, weights in FP8": (DELAYED, {"precision": STORED}),
    "current": (CurrentScaling(), {}),
    "current, weights in FP8": (CurrentScaling(), {"precision": STORED}),
    "block": (BlockScaling(), {}),
}


@functools.cache
def of_one_rank(case: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run_ranks(1, trained, *CASES[case], {})[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_has_the_bits_of_one(case: str) -> None:
    expected = of_one_rank(case)
    for world_size in RANKS.get(case, (2,)):
        assert_same_bits(expected, world_size, trained, *CASES[case], {})
    histories = [value for name, value in expected.items() if "history" in name]
    assert bool(histories) is (CASES[case][0] is DELAYED)
    # One row a step, from the end on; the first is where casts write.
    for history in histories:
        filled = (history > 0).any(dim=1).tolist()
        assert filled == [False] * (len(history) - STEPS) + [True] * STEPS
    assert all(value.isfinite().all() for value in expected.values())


def test_lanes_of_two_microbatches() -> None:
    longer = (*CASES["delayed"], {}, 24)
    assert_same_bits(run_ranks(1, trained, *longer)[0], 3, trained, *longer)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (1, {"around": "step"}),
        (2, {"around": "microbatch"}),
        (2, {"around": "step"}),
        (2, {"caches": True}),
        (2, {"recompute": True}),
    ],
    ids=str,
)
def test_where_the_region_ends_does_not_matter(world_size: int, way: dict[str, Any]) -> None:
    """It ends before or after the backward; layers may cache their cast weights, or be recomputed."""
    way = dict(way)
    options = {"recompute": way.pop("recompute", False)}
    assert_same_bits(of_one_rank("delayed"), world_size, trained, DELAYED, options, way)


def rows(rank: int, world_size: int, lanes: Lanes | None) -> tuple[int, int]:
    """Number of updates of a first step, and of rows in a history."""
    model = build(lanes)
    numbers = range(rank, 12, world_size) if lanes is None else model.microbatch_numbers(12)
    with counted_updates() as updates:
        run_step(model, [batch(0, number) for number in numbers], replace(DELAYED, amax_history_len=32))
    filled = {int((v > 0).any(dim=1).sum()) for name, v in fp8_state(model).items() if "history" in name}
    assert len(filled) == 1
    return len(updates), filled.pop()


def test_without_lanes_the_number_of_ranks_changes_the_number_of_updates() -> None:
    assert [run_ranks(n, rows, None)[0] for n in (1, 2)] == [(24, 12), (12, 6)]
    assert [run_ranks(n, rows, LANES)[0] for n in (1, 2)] == [(1, 1), (1, 1)]


@on_ranks(1, 2)
def test_the_first_step_has_the_scales_of_its_tensors(rank: int) -> None:
    """Nothing is updated before the last backward of a step, and an evaluation in it changes nothing."""
    model = build()
    numbers = model.microbatch_numbers(12)
    for index, number in enumerate(microbatches(model, numbers)):
        with counted_updates() as updates:
            with torch.no_grad(), autocast(recipe=DELAYED):
                model(batch(1, 0))
            with autocast(recipe=DELAYED):
                loss = model(batch(0, number)).square().mean()
            layer = model.head
            assert not any(scaling.has_scales for scaling in layer._scalings.values())
            loss.backward()
        assert len(updates) == (index == len(numbers) - 1)
    assert all(scaling.has_scales for scaling in layer._scalings.values())


@on_ranks(1, 2)
def test_skipped_failed_and_left_steps_leave_no_trace(rank: int) -> None:
    models = model, undisturbed = build(), build()
    numbers = model.microbatch_numbers(12)
    optimizers = [AdamW(each.parameters(), lr=1e-2, nonfinite="skip") for each in models]

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def leave(fails: bool) -> None:
        for index, number in enumerate(microbatches(model, numbers)):
            with autocast(recipe=DELAYED):
                loss = model(batch(9, number)).square().mean()
            if index < 3:
                loss.backward()
                continue
            if fails:
                loss.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            break
        optimizers[0].zero_grad()

    for index, kind in enumerate(("skipped", "left", "skipped", "failed", "left")):
        before = fp8_state(model)
        if kind == "skipped":
            run_step(model, [batch(7, number) * float("nan") for number in numbers])
            update(optimizers[0])
            assert not before or differing(before, fp8_state(model)) == []
        else:
            leave(fails=kind == "failed")
        for each in models:
            run_step(each, [batch(index, number) for number in numbers])
        update(*optimizers)
    assert differing(snapshot(model), snapshot(undisturbed)) == []


@on_ranks(2)
def test_scales_that_ranks_do_not_share_raise(rank: int, world_size: int) -> None:
    groups = [dist.new_group([each]) for each in range(world_size)]
    model, x = build(), batch(0, 0)
    for _ in microbatches(model, range(6)):
        with (
            pytest.raises(ValueError, match="share their scales"),
            autocast(recipe=replace(DELAYED, reduce_amax=False)),
        ):
            model(x)
        with pytest.raises(ValueError, match="share their scales"):
            with autocast(recipe=DELAYED, amax_reduction_group=groups[rank]):
                model(x)
        break
