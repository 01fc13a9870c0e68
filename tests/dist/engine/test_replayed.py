"""Replayed microbatches over ranks have the bits of eager ones, whatever happens in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import by_class, microbatches, replayed, shard
from flatfsdp.engine.replay.eager_or_replayed import MOST_RECORDINGS, Replayed
from flatfsdp.engine.replay.preconditions import facts_of
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import root_of
from flatfsdp.fp8 import autocast
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import SHORT
from tests.support.meshes import HYBRID, placed
from tests.support.models import update
from tests.support.ranks import on_ranks
from tests.support.replaying.cases import CASES, Case, Plain, batch, net
from tests.support.replaying.search import replays_of
from tests.support.replaying.steps import EVENTS, Step, steps_of, trained
from tests.support.tape import taped


def compare(case: Case, rank: int, steps: Sequence[Step]) -> Replayed[Any, Any]:
    expected = trained(case, rank, False, steps)
    with taped():
        found = trained(case, rank, True, steps)
    assert found.has_bits_of(expected)
    return found.step


def run_steps(model: Any, step: Callable[[Tensor], Any], rank: int, count: int = 5) -> None:
    """Steps of one microbatch, without an optimizer."""
    for index in range(count):
        step(batch(rank, index, 0))
        model.zero_grad()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_ranks(2)
def test_bits_are_those_of_eager_microbatches(rank: int, case: Case) -> None:
    steps = steps_of(case, steps=6)
    step = compare(case, rank, steps)
    # Each kind is run twice or three times, as the first step finds what later ones do not, and recorded.
    # With "every" the second is one of its own: it begins the sums of units that the first has left.
    kinds = min(case.count, 4 if case.reduces_every else 3)
    assert step.replays >= case.count * len(steps) - 4 * kinds


@on_ranks(4)
def test_a_hybrid_mesh_that_reduces_in_every_microbatch(rank: int) -> None:
    case = Case("", True, 3, reduces_every=True, spread=partial(placed, HYBRID))
    assert compare(case, rank, steps_of(case, steps=6)).replays > 0


@on_ranks(2)
def test_what_happens_between_steps(rank: int) -> None:
    """With ZeRO-2, where gathered weights stay; `test_replay_notices.py` has changes with ZeRO-3 as well."""
    case = Case("", False, 3)
    for event in EVENTS.values():
        assert compare(case, rank, steps_of(case, event)).replays > 0


@on_ranks(2)
def test_at_random(rank: int) -> None:
    """For others: `tests/support/replaying/search.py`."""
    with taped():
        assert sum(replays_of(rank, seed) for seed in range(4)) > 30


def in_both_ways(
    case: Case, rank: int, train: Callable[[Any, Callable[..., Any]], list[Any]]
) -> Replayed[Any, Any]:
    """Trains eagerly and replayed; `train` gets a model, and the wrapper for its microbatch function."""
    steps: list[Replayed[Any, Any]] = []

    def wrap(model: Any, function: Callable[..., Any]) -> Replayed[Any, Any]:
        steps.append(replayed(model, function))
        return steps[-1]

    found = []
    for replays in (False, True):
        torch.manual_seed(rank)
        with taped():
            model = case.model()
            found.append(train(model, partial(wrap, model) if replays else lambda function: function))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    return steps[0]


@on_ranks(2)
def test_other_shapes_are_recordings_of_their_own(rank: int) -> None:
    case = Case("", True, 2)

    def train(model: Any, wrap: Callable[..., Any]) -> list[Any]:
        step, optimizer, losses = wrap(case.microbatch(model)), AdamW(model.parameters(), lr=1e-2), []
        for index, tokens in enumerate(itertools.chain([8] * 5, [16] * 5, [8, 24, 16, 8])):
            for x in microbatches(model, [batch(rank, index, m, tokens) for m in range(2)]):
                losses.append(step(x))
            update(optimizer)
        return losses

    assert in_both_ways(case, rank, train).replays >= 2 * (5 - 4 + 5 - 4 + 3)


@on_ranks(2)
def test_what_is_recorded_before_there_are_scales_is_not_replayed_later(rank: int) -> None:
    """One FP8 region per step, and a first step that is skipped: the second step still has no scales."""
    case = Case("", True, 6, SHORT)

    def train(model: Any, wrap: Callable[..., Any]) -> list[Any]:
        step, losses = wrap(case.microbatch(model)), []
        optimizer = AdamW(model.parameters(), lr=1e-2, nonfinite="skip")
        for index in range(4):
            with autocast(recipe=SHORT):
                for x in microbatches(model, [batch(rank, index, m) for m in range(case.count)]):
                    losses.append(step(x * torch.nan if index == 0 else x))
            update(optimizer)
        assert optimizer.skipped_steps == 1
        return losses[case.count :]

    assert in_both_ways(case, rank, train).replays >= 6


@on_ranks(2)
def test_nothing_that_a_microbatch_changes_is_forgotten(rank: int) -> None:
    for case in (Case("", True, 3), Case("", False, 3), Case("", False, 2, SHORT)):
        models, torch_seed = [], 7 + rank
        for replays in (False, True):
            torch.manual_seed(torch_seed)
            with taped():
                model = case.model()
                run = case.microbatch(model)
                step: Any = replayed(model, run) if replays else run
                optimizer = AdamW(model.parameters(), lr=1e-2)
                for index in range(5):
                    for x in microbatches(model, [batch(rank, index, m) for m in range(case.count)]):
                        step(x)
                    update(optimizer)
                batches = microbatches(model, [batch(rank, 9, m) for m in range(case.count)])
                step(next(batches))
            models.append((model, batches))
        eager, taken = (root_of(model) for model, _ in models)
        assert facts_of(taken) == facts_of(eager)
        assert taken.shared.ledger.bytes == eager.shared.ledger.bytes
        assert taken.shared.ledger.calls == eager.shared.ledger.calls
        for ours, theirs in zip(taken.groups, eager.groups, strict=True):
            assert ours.master.marks.is_on == theirs.master.marks.is_on
        for name in ("index", "is_first", "is_last", "step", "steps_reduced"):
            assert getattr(taken.microbatch, name) == getattr(eager.microbatch, name)


@on_ranks(2)
def test_gradients_that_somebody_keeps_stay(rank: int) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    case = Case("", True, 2)
    with taped():
        model = case.model()
        step, optimizer = replayed(model, case.microbatch(model)), AdamW(model.parameters(), lr=1e-2)
        for index in range(7):
            for x in microbatches(model, [batch(rank, index, m) for m in range(2)]):
                step(x)
            kept += [(p.grad, plain(p.grad).clone()) for p in model.parameters() if p.grad is not None]
            update(optimizer)
    assert kept and all(torch.equal(plain(grad), then) for grad, then in kept)


@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
@on_ranks(2)
def test_gradients_are_zeroed_between_microbatches(rank: int, reshard: bool) -> None:
    case = Case("", reshard, 3)

    def train(model: Any, wrap: Callable[..., Any]) -> list[Any]:
        step, optimizer, found = wrap(case.microbatch(model)), AdamW(model.parameters(), lr=1e-2), []
        for index in range(8):
            for m, x in enumerate(microbatches(model, [batch(rank, index, m) for m in range(3)])):
                found.append(step(x))
                if index == 6 and m == 0:
                    optimizer.zero_grad()
            found += [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
            update(optimizer)
        return found

    in_both_ways(case, rank, train)


@on_ranks(2)
def test_a_buffer_is_replaced_by_a_part_of_itself(rank: int) -> None:
    def train(model: Any, wrap: Callable[..., Any]) -> list[Any]:
        model.register_buffer("mask", torch.ones(4))

        def function(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean() * model.mask.sum()
            loss.backward()
            return loss.detach()

        step, found = wrap(function), []
        for index in range(7):
            if index == 5:
                model.mask = model.mask[:2]
            found.append(step(batch(rank, index, 0)))
            model.zero_grad()
        return found

    in_both_ways(Case("", True, 1), rank, train)


@on_ranks(2)
def test_evaluations_by_the_same_function(rank: int) -> None:
    def train(model: Any, wrap: Callable[..., Any]) -> list[Any]:
        def function(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            if torch.is_grad_enabled():
                loss.backward()
            return loss.detach()

        step, found = wrap(function), []
        for index in range(7):
            found.append(step(batch(rank, index, 0)))
            model.zero_grad()
            with torch.no_grad():
                found += [step(batch(rank, index, m)) for m in range(4)]
            found.append(torch.tensor(root_of(model).microbatch.step))
        return found

    in_both_ways(Case("", True, 1), rank, train)


@on_ranks(2)
def test_arguments_that_always_change_are_not_kept(rank: int) -> None:
    def function(x: Tensor, scale: float) -> Tensor:
        loss = model(x).float().square().mean() * scale
        loss.backward()
        return loss.detach()

    with taped():
        model = Case("", True, 1).model()
        step = replayed(model, function)
        scales = itertools.count(1.0)
        run_steps(model, lambda x: step(x, next(scales)), rank, 30)
    assert step.replays == 0 and len(step._seen) <= MOST_RECORDINGS + 1


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="is not sharded"):
        replayed(nn.Linear(2, 2), print)
    model = shard(net(), by_class(Plain), optimize_backward_concat=False)
    with pytest.raises(ValueError, match="cannot be replayed yet"):
        replayed(model, print)
    case = Case("", True, 1)
    with taped():
        model = case.model()
        step = replayed(model, case.microbatch(model))
        with pytest.raises(ValueError, match="requires a gradient"):
            step(batch(rank, 0, 0).requires_grad_())


@on_ranks(2)
def test_recordings_go_before_a_process_group_does(rank: int) -> None:
    """NCCL waits for graphs that launch its collectives, so `destroy_process_group` would hang."""
    case, group = Case("", True, 1), dist.new_group()
    with taped():
        model = shard(net(), by_class(Plain), mesh=DeviceMesh.from_group(group, "cpu"))
        step = replayed(model, case.microbatch(model))
        run_steps(model, step, rank)
        recording = next(seen.recording for seen in step._seen.values())
        assert recording is not None and recording.graph._calls
        dist.barrier()
        dist.destroy_process_group(group)
        assert not step._seen and not recording.graph._calls


@pytest.mark.parametrize("backwards", [1, 2])
@on_ranks(2)
def test_what_no_graph_can_hold_raises_and_training_goes_on(rank: int, backwards: int) -> None:
    """Microbatches in which the host reads a number, or with two backwards, cannot be recorded."""
    case = Case("", True, 1)
    model = case.model()
    run = case.microbatch(model)

    def function(x: Tensor) -> Any:
        losses = [run(x) for _ in range(backwards)]
        return losses[0].item() if backwards == 1 else losses

    with taped(), pytest.raises(RuntimeError, match="cannot be recorded as a CUDA graph"):
        run_steps(model, replayed(model, function), rank)
    model.zero_grad()
    model(batch(rank, 0, 0)).sum().backward()


@on_ranks(2)
def test_hooks_keep_microbatches_eager(rank: int) -> None:
    case, calls = Case("", True, 1), []
    with taped():
        model = case.model()
        handle = model[0].up.register_forward_hook(lambda *_: calls.append(1))
        step = replayed(model, case.microbatch(model))
        run_steps(model, step, rank)
        assert step.replays == 0 and len(calls) == 5
        handle.remove()
        run_steps(model, step, rank)
        assert step.replays > 0
