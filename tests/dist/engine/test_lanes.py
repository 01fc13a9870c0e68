"""With lanes, any number of ranks has the bits of one, which are those of the plain program."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import Lanes, Precision, microbatches, replayed, shard
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.fp8 import autocast
from flatfsdp.optim import AdamW
from flatfsdp.parallel import FlatStage
from tests.support.assertions import assert_raises
from tests.support.fp8_layers import SHORT
from tests.support.fp8_training import batch as fp8_batch
from tests.support.fp8_training import build as build_fp8
from tests.support.lanes import (
    IN_BLOCKS,
    LAYOUTS,
    ZERO2,
    Layouts,
    OfStep,
    assert_layouts_agree,
    assert_same_bits,
    differing,
    microbatch,
)
from tests.support.meshes import HYBRID, REPLICATED, replicating
from tests.support.models import VOCAB, backward, build, plain_net, update
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tape import taped

STEPS, TOTAL = 2, 12
BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


def groups_of(model: Any) -> list[FlatGroup]:
    return [group for _, group in named_groups(model)]


def alone() -> DeviceMesh:
    """A mesh of this rank by itself."""
    return DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("each", "shard"))["shard"]


def trained(
    rank: int, world_size: int, lanes: Lanes, total: int, precision: Precision, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Whole weights after some steps of AdamW with clipping."""
    model = build(lanes=lanes, precision=precision, **options)
    numbers = model.microbatch_numbers(total)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        backward(OfStep(model, total), [microbatch(step, number) for number in numbers])
        update(optimizer)
    return model.state_dict()


@functools.cache
def of_plain_program() -> dict[str, Tensor]:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number in range(TOTAL):
            (model(microbatch(step, number)) / TOTAL).backward()
        update(optimizer)
    return model.state_dict()


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_number_of_ranks_has_the_bits_of_the_plain_program(name: str) -> None:
    world_size, options = LAYOUTS[name]
    assert_same_bits(of_plain_program(), world_size, trained, Lanes(TOTAL), TOTAL, Precision(), options)


@pytest.mark.parametrize(
    ("lanes", "total", "precision", "layouts"),
    [
        (Lanes(6), 12, BF16, {name: of for name, of in LAYOUTS.items() if of[0] != 4}),
        (Lanes(12, block=2), 12, Precision(), {**IN_BLOCKS, "6 ranks": (6, {})}),
        (Lanes(16, block=4), 16, BF16, IN_BLOCKS),
    ],
    ids=["two microbatches a lane, bf16 wire", "blocks of 2", "blocks of 4, bf16 wire"],
)
def test_all_layouts_have_the_same_bits(
    lanes: Lanes, total: int, precision: Precision, layouts: Layouts
) -> None:
    assert_layouts_agree(layouts, trained, lanes, total, precision)


# ---- what does not fit is said on all ranks, before anything is sent ---------------------------------------


@on_ranks(2)
def test_lanes_that_do_not_fit() -> None:
    for options, error, message in (
        ({"lanes": 3}, ValueError, r"lanes=3 over 2 ranks: .* take a multiple of 2 as lanes"),
        ({"lanes": 0}, ValueError, "number is 0; it must be a positive integer"),
        ({"lanes": True}, ValueError, "number is True"),
        ({"lanes": 4, "grad_sync": "every"}, ValueError, 'leave out grad_sync="every"'),
        ({"lanes": Lanes(12, block=3)}, ValueError, "blocks of 3 lanes over 2 ranks"),
        ({"lanes": Lanes(4, block=4), **REPLICATED}, ValueError, r"blocks of 4 on a mesh of \(2, 1\)"),
        (
            {"lanes": 2, "mesh": alone(), "tp_group": dist.group.WORLD},
            NotImplementedError,
            "leave out lanes or tp_group",
        ),
    ):
        assert_raises(error, message, build, **options)
    assert_raises(ValueError, "12 lanes are no whole number of blocks of 5", Lanes, 12, block=5)
    # Microbatches leave statistics behind, in the order in which they come.
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert_raises(ValueError, "1 is a BatchNorm1d, whose statistics", shard, net, lanes=2)
    shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()), lanes=2)


@on_ranks(2)
def test_pipelines_are_not_there_yet(rank: int) -> None:
    part = build(lanes=1, mesh=alone())
    with pytest.raises(NotImplementedError, match="leave out lanes, or train without a pipeline"):
        FlatStage(part, rank, 2, group=dist.group.WORLD)


@on_ranks(2)
def test_microbatches_that_lanes_do_not_divide() -> None:
    model = build(lanes=4)
    with pytest.raises(ValueError, match=r"10 microbatches a step over 4 lanes: .* take a multiple of 4"):
        model.microbatch_numbers(10)
    with pytest.raises(
        ValueError, match=r"3 microbatches on a rank that works through 2 lanes .* multiple of 2"
    ):
        backward(model, [microbatch(0, number) for number in range(3)])
    # Nothing has begun: the next step is clean.
    numbers = model.microbatch_numbers(4)
    assert len(backward(model, [microbatch(0, number) for number in numbers])) == 2
    with pytest.raises(ValueError, match="is for models with lanes"):
        build().microbatch_numbers(4)


@on_ranks(2)
def test_a_loop_that_does_not_tell_where_lanes_end() -> None:
    model = build(lanes=4)
    words = r"2 lanes in a step; run .* inside flatfsdp\.microbatches.* no_sync\(\) and set_is_last_backward"
    for context in (nullcontext, model.no_sync):
        with context(), pytest.raises(RuntimeError, match=words):
            model(microbatch(0, 0))
    model.set_is_last_backward(False)
    with pytest.raises(RuntimeError, match=words):
        model(microbatch(0, 0))
    model.set_is_last_backward(True)
    # Evaluations have no lanes.
    with torch.no_grad():
        model(microbatch(0, 0))


@on_ranks(2)
def test_ranks_with_other_lanes_or_other_numbers_of_microbatches(rank: int) -> None:
    model = build(lanes=2 + 2 * rank)
    with pytest.raises(RuntimeError, match=r"differ|do not do the same|not the same"):
        backward(model, [microbatch(0, 0), microbatch(0, 1)])


@on_ranks(2)
def test_a_last_step_with_fewer_microbatches_on_one_rank(rank: int) -> None:
    # With ZeRO-3 the next microbatch's gather would not find a partner.
    model = build(lanes=2, reshard_after_forward=False)
    with pytest.raises(
        RuntimeError, match=r"ends a step of \d microbatches, of which lanes need equally many"
    ):
        backward(model, [microbatch(0, number) for number in range(3 - rank)])


def skipping(model: Any, batches: Any) -> None:
    for place, batch in enumerate(batches):
        if place != 1:
            model(batch).backward()


def twice(model: Any, batches: Any) -> None:
    for batch in batches:
        for _ in range(2):
            model(batch).backward()


def of_a_sum(model: Any, batches: Any) -> None:
    sum(model(batch) for batch in batches).backward()


def at_the_end(model: Any, batches: Any) -> None:
    losses = [model(batch) for batch in batches]
    for loss in losses:
        loss.backward()


def after_a_failure(model: Any, batches: Any) -> None:
    for place, batch in enumerate(batches):
        if place == 1:
            with pytest.raises(IndexError):
                model(batch + VOCAB)
        else:
            model(batch).backward()


@pytest.mark.parametrize(
    ("lanes", "loop"),
    [
        # With one lane a rank, a backward outside of a loop is a step of one microbatch, as ever.
        *((Lanes(2), loop) for loop in (skipping, twice, after_a_failure)),
        *((Lanes(8), loop) for loop in (skipping, twice, of_a_sum, at_the_end, after_a_failure)),
        *((Lanes(8, block=4), loop) for loop in (skipping, twice, of_a_sum, after_a_failure)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2)
def test_a_batch_without_a_backward_of_its_own(lanes: Lanes, loop: Any) -> None:
    """It would shift all later ones to other lanes, or leave a block unfinished, whose sum would be lost."""
    model = build(lanes=lanes)
    numbers = model.microbatch_numbers(8)
    words = r"has one backward, while it is its turn|inside flatfsdp\.microbatches"
    with pytest.raises(RuntimeError, match=words):
        loop(model, microbatches(model, [microbatch(0, number) for number in numbers]))
    for parameter in model.parameters():
        parameter.grad = None
    backward(model, [microbatch(0, number) for number in numbers])
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
def test_the_loop_alone_says_which_backward_is_the_last() -> None:
    model = build(lanes=2)
    for _ in microbatches(model, [0, 1]):
        with pytest.raises(RuntimeError, match="says which backward is the last"):
            model.set_is_last_backward(True)


@on_ranks(2)
def test_penalties_on_listed_parameters() -> None:
    model = build(lanes=2)
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"penalty on model\.parameters.* has a gradient of its own"):
        (model(microbatch(0, 0)) + penalty).backward()


@on_ranks(2)
def test_units_on_other_meshes() -> None:
    model = plain_net()
    shard(model.blocks[0], lanes=2, mesh=replicating())
    shard(model, lanes=2)
    with pytest.raises(ValueError, match="needs the mesh of its root"):
        model(microbatch(0, 0))


@on_ranks(2)
def test_what_lanes_move() -> None:
    """A turn sends as many bytes as a reduce-scatter, and nothing of a sum is left behind, which becomes the
    gradient unless that has another dtype."""
    model = build(lanes=8)
    ledger = model.fsdp_state.shared.ledger
    padded = sum(group.layout.padded_numel(2) for group in groups_of(model))
    report = {row.buffer: row for row in model.memory_report().rows}
    assert not {"partial gradient", "sum of a block"} & report.keys()
    narrow = build(lanes=8, precision=Precision(param=torch.bfloat16, grad=torch.bfloat16))
    (partial,) = [row for row in narrow.memory_report().rows if row.buffer == "partial gradient"]
    assert partial.total == 4 * padded // 2
    assert 0 < report["rows of lanes"].at_a_time < report["rows of lanes"].total == 4 * padded // 2
    for turns_of in (0, 1):
        ledger.reset()
        backward(model, [microbatch(turns_of, number) for number in model.microbatch_numbers(8)])
        assert ledger.bytes["reduce"] == 4 * (4 * padded // 2)
        assert all(each.so_far is None for group in groups_of(model) for each in group.sums)
        for parameter in model.parameters():
            parameter.grad = None


# ---- loops that tell only where a step ends, and replays -------------------------------------------------


ONE_EACH = Lanes(2)
NARROW = Precision(param=torch.bfloat16)
"""Sums of gradients are wider than gradients, so they have memory of their own."""


def trained_by(rank: int, world_size: int, loop: str) -> dict[str, Tensor]:
    model = build(lanes=ONE_EACH)
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
    assert_same_bits(run_ranks(1, trained_by, "microbatches")[0], 2, trained_by, loop)


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
def eager(lanes: Lanes, is_fp8: bool, precision: Precision) -> dict[str, Tensor]:
    options = {"precision": precision}
    weights: dict[str, Tensor] = run_ranks(1, replaying, lanes, False, is_fp8, options)[0][0]
    return weights


@pytest.mark.parametrize(
    ("is_fp8", "lanes", "ranks", "options"),
    [
        (False, Lanes(2), 1, {}),
        (False, Lanes(12), 2, ZERO2),
        (False, Lanes(12), 2, {"precision": NARROW}),
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
    expected = eager(lanes, is_fp8, options.get("precision", Precision()))
    for weights, replays in run_ranks(ranks, replaying, lanes, True, is_fp8, options):
        # After some eager steps and one that records, all are replayed.
        assert replays >= 2 * TOTAL // ranks
        assert differing(weights, expected) == []
