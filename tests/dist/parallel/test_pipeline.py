"""Pipeline stages: every schedule gives one process's gradients, reduced once a step, flag off or on."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from flatfsdp import Precision
from flatfsdp.engine.storage.state import ShardState
from flatfsdp.engine.whole.units import units_in
from flatfsdp.parallel import FlatStage
from tests.support.against_plain import assert_equal
from tests.support.models import FLAGS, RESHARD, same, update
from tests.support.pipelines import MICROBATCHES, Pipeline, loss_of, mesh_of, one_by_one, parts, tokens_of
from tests.support.plain_layers import assert_near
from tests.support.ranks import on_ranks

SCHEDULES = pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
BF16 = Precision(compute=torch.bfloat16)


class Trace(NamedTuple):
    losses: list[Tensor]
    grads: list[Tensor]
    named_grads: dict[str, Tensor]
    parameters: list[Tensor]


def train(pipeline: Pipeline) -> Trace:
    """Three steps of AdamW."""
    flats = [p for model in pipeline.models for p in model.parameters()]
    optimizer = torch.optim.AdamW(flats, lr=1e-2)
    losses, grads, first = [], [], {}
    for tokens in tokens_of(pipeline.mesh.get_local_rank("dp")):
        losses += pipeline.step(tokens)
        grads += pipeline.grads()
        first = first or pipeline.named_grads()
        update(optimizer)
    return Trace(losses, grads, first, [p.detach().clone() for p in flats])


def train_in_one_process(replica: int, dp: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of one replica in all steps, and the gradients of the first."""
    model = parts(1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for batches in zip(*(tokens_of(r) for r in range(dp)), strict=True):
        for owner, tokens in enumerate(batches):
            for part in tokens.chunk(MICROBATCHES):
                loss = loss_of(model(part), part)
                (loss / MICROBATCHES / dp).backward()
                if owner == replica:
                    losses.append(loss.detach())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        update(optimizer)
    return losses, first


def off_and_on(rank: int, world_size: int, schedule: type, dp: int, options: dict[str, Any]) -> Trace:
    traces = [
        train(Pipeline(schedule, world_size // dp, dp, optimize_backward_concat=flag, **options))
        for flag in (False, True)
    ]
    off, on = traces
    assert off.grads
    for field in ("losses", "grads", "parameters"):
        assert same(getattr(off, field), getattr(on, field)), field
    return on


@SCHEDULES
@pytest.mark.parametrize(
    ("world_size", "dp", "reshard"),
    [(2, 1, True), (4, 2, True), (4, 2, False)],
    ids=["pp2", "pp2-dp2-zero3", "pp2-dp2-zero2"],
)
@on_ranks()
def test_flag_off_on_and_one_process_agree(
    rank: int, world_size: int, schedule: type, dp: int, reshard: bool
) -> None:
    if world_size == 2:
        off_and_on(rank, world_size, schedule, dp, {"reshard_after_forward": reshard, "precision": BF16})
    on = off_and_on(rank, world_size, schedule, dp, {"reshard_after_forward": reshard})
    losses, grads = train_in_one_process(mesh_of(world_size // dp, dp).get_local_rank("dp"), dp)
    if on.losses:
        torch.testing.assert_close(torch.stack(on.losses), torch.stack(losses), rtol=1e-6, atol=0)
    assert on.named_grads.keys() < grads.keys()
    assert_near(on.named_grads, grads)


@on_ranks(4)
def test_policies_given_shapes_and_wrapping_change_nothing(rank: int, world_size: int) -> None:
    """The policy changes when memory is used, not what is computed."""
    traces = [
        off_and_on(rank, world_size, Schedule1F1B, 2, options)
        for options in (
            {"reshard_after_forward": True},
            {"reshard_after_forward": False, "static": True},
            {"wrap": one_by_one},
            {"grad_sync": "every"},
        )
    ]
    assert same(traces[0].grads, traces[1].grads)
    assert_equal(traces[2].named_grads, traces[0].named_grads)
    torch.testing.assert_close(traces[3].named_grads, traces[0].named_grads, rtol=1e-5, atol=1e-8)


class Probe(FlatStage):
    """Records the buffers when the first microbatch starts, and the reductions when a backward ends."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0:
            self.before_first = {
                "main_grad": any(g.main_grad.holds_gradients for g in groups_of(self)),
                "grad": any(p.grad is not None for p in self.submod.parameters()),
                "reductions": self.submod.fsdp_state.shared.ledger.calls["reduce"],
                "backwards": self.submod.fsdp_state.shared.microbatch.index,
                "parameters": has_parameters(self),
            }
            self.reduced: list[int] = []
            self.kept: list[bool] = []
            self.unreduced: list[bool] = []
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(*args, **kwargs)
        self.reduced.append(self.submod.fsdp_state.shared.ledger.calls["reduce"])
        self.kept.append(has_parameters(self))
        self.unreduced.append(any(group.main_grad.holds_gradients for group in groups_of(self)))


def has_parameters(stage: FlatStage) -> bool:
    return any(group.state.shard is not ShardState.SHARDED for group in groups_of(stage))


def groups_of(stage: FlatStage) -> list[Any]:
    return [
        group for _, wrapped in units_in(stage.submod) for group in wrapped.fsdp_state.groups if group.trains
    ]


def watch(model: Any) -> tuple[Any, list[int]]:
    """Reductions that have been launched when the inputs of the first block get their gradient."""
    seen: list[int] = []

    def follow(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: seen.append(model.fsdp_state.shared.ledger.calls["reduce"]))

    return model.blocks[0].register_forward_pre_hook(follow), seen


@SCHEDULES
@RESHARD
@FLAGS
@on_ranks(4)
def test_a_unit_is_reduced_once_a_step_inside_the_last_backward(
    rank: int, schedule: type, flag: bool, reshard: bool
) -> None:
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    pipeline = Pipeline(schedule, 2, 2, stage=Probe, **options)
    for stage in pipeline.stages:
        assert not any(group.main_grad.holds_gradients for group in groups_of(stage))
    for number, tokens in enumerate(tokens_of(rank % 2, steps=2)):
        for model in pipeline.models:
            model.fsdp_state.shared.ledger.reset()
        seen = [watch(model) for model in pipeline.models]
        pipeline.step(tokens)
        for stage, (handle, inside) in zip(pipeline.stages, seen, strict=True):
            handle.remove()
            if number == 0:
                assert not any(stage.before_first.values()), stage.before_first
            units = len(groups_of(stage))
            assert stage.reduced == [0] * (MICROBATCHES - 1) + [units]
            assert stage.submod.fsdp_state.shared.ledger.calls["reduce"] == units
            assert stage.kept == [not options["reshard_after_forward"]] * (MICROBATCHES - 1) + [False]
            assert stage.submod.fsdp_state.shared.microbatch.step == number + 1
            if not stage.is_first:
                # All but the first block, and what is around the blocks, before the backward is over.
                assert inside == [0] * (MICROBATCHES - 1) + [len(stage.submod.blocks) - 1]


@SCHEDULES
@pytest.mark.parametrize(("world_size", "sync"), [(2, "last"), (4, "every")])
@on_ranks()
def test_gradients_are_divided_once_and_only_those_of_the_step(
    rank: int, world_size: int, schedule: type, sync: str
) -> None:
    """There are only shards of gradients between microbatches where every backward reduces."""
    dp = world_size // 2
    first, second = tokens_of(rank % dp, steps=2)
    options: dict[str, Any] = {"stage": Probe, "grad_sync": sync}
    divided, summed = (Pipeline(schedule, 2, dp, scale_grads=scale, **options) for scale in (True, False))
    # Before the first step, which has a backward where this one has none.
    with torch.no_grad():
        summed.schedule.eval(*([first] if summed.is_first else []), target=first)
    grads = []
    for tokens in (first, second):
        for pipeline in (divided, summed):
            for model in pipeline.models:
                model.fsdp_state.shared.ledger.reset()
            pipeline.zero_grad()
            pipeline.step(tokens)
            for stage in pipeline.stages if sync == "every" else ():
                units = len(groups_of(stage))
                # All but the last backward leave two units to the next microbatch, where there are more.
                left = 2 if units > 2 else 0
                early = [units * (number + 1) - left for number in range(MICROBATCHES - 1)]
                assert stage.reduced == [*early, units * MICROBATCHES]
                assert stage.unreduced == [*[left > 0] * (MICROBATCHES - 1), False]
        grads.append(divided.grads())
        assert same(summed.grads(), [grad * MICROBATCHES for grad in grads[-1]])
    divided.zero_grad()
    divided.step(first)
    divided.step(second)
    assert same(divided.grads(), [a + b for a, b in zip(*grads, strict=True)])
    for stage in divided.stages:
        stage.scale_grads(MICROBATCHES)
    divided.schedule.eval(*([first] if divided.is_first else []), target=first)
    assert same(divided.grads(), [a + b for a, b in zip(*grads, strict=True)])
