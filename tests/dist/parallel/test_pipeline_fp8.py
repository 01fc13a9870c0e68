"""FP8 in pipeline stages: scales are shared by the ranks that have a stage, and by no others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from flatfsdp import Debug, Precision, by_class, shard
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.weight_cache import WeightCache
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.parallel import FlatStage, ParallelMesh, make_mesh
from tests.support.fp8_layers import TOKENS, WIDTH, Block, fp8_state
from tests.support.fp8_training import counted_reductions
from tests.support.llamas import mesh_of
from tests.support.models import same, update
from tests.support.ranks import on_ranks

MICROBATCHES, STEPS = 4, 2
DELAYED, CURRENT = DelayedScaling(amax_history_len=4), CurrentScaling()
SCHEDULES = pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleaved1F1B])


class Part(nn.Module):
    """Some of four blocks.

    Args:
        recipe: of a region in the forward; None: there is none.
        group: that the region is given.
    """

    def __init__(self, numbers: range, recipe: Any, group: Any) -> None:
        super().__init__()
        blocks = {}
        for number in numbers:
            torch.manual_seed(number)
            blocks[str(number)] = Block()
        self.blocks = nn.ModuleDict(blocks)
        self.recipe, self.group = recipe, group

    def forward(self, x: Tensor) -> Tensor:
        region: AbstractContextManager[None] = nullcontext()
        if self.recipe is not None:
            region = autocast(recipe=self.recipe, amax_reduction_group=self.group)
        with region:
            for block in self.blocks.values():
                x = block(x)
        return x


class Trace(NamedTuple):
    losses: list[Tensor]
    grads: list[Tensor]
    parameters: list[Tensor]
    scales: list[Tensor]


class Pipeline:
    """This rank's stages over all blocks.

    Args:
        around: a region around each step.
        static: the schedule is told what stages exchange.
    """

    def __init__(
        self,
        schedule: type,
        mesh: ParallelMesh,
        recipe: Any = None,
        group: Any = None,
        around: Any = nullcontext,
        static: bool = False,
        **options: Any,
    ) -> None:
        is_multi = schedule is ScheduleInterleaved1F1B
        total = 2 * mesh.pp_size if is_multi else mesh.pp_size
        per_stage, indices = 4 // total, range(mesh.pp_rank, total, mesh.pp_size)
        parts = [Part(range(per_stage * i, per_stage * (i + 1)), recipe, group) for i in indices]
        self.models: list[Any] = [
            shard(part, by_class(Block), mesh=mesh.dp, debug=Debug(poison_on_free=True), **options)
            for part in parts
        ]
        example = torch.empty(TOKENS, WIDTH)
        shapes = {"input_args": example, "output_args": example} if static else {}
        stages: Any = [
            FlatStage(model, index, total, group=mesh.pp_group, **shapes)
            for index, model in zip(indices, self.models, strict=True)
        ]
        self.schedule: Any = schedule(stages if is_multi else stages[0], MICROBATCHES, loss_fn=_loss)
        self.around, self.is_first, self.is_last = around, 0 in indices, total - 1 in indices
        self.dp_rank = mesh.dp_rank

    def step(self, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10 * self.dp_rank + number)
        x = torch.randn(MICROBATCHES * TOKENS, WIDTH, generator=generator)
        losses: list[Tensor] = []
        with self.around():
            self.schedule.step(
                *([x] if self.is_first else []), target=x if self.is_last else None, losses=losses
            )
        return [loss.detach() for loss in losses]

    def train(self, steps: int = STEPS) -> Trace:
        flats = [p for model in self.models for p in model.parameters()]
        optimizer = torch.optim.SGD(flats, lr=1e-2)
        trace = Trace([], [], [], [])
        for number in range(steps):
            trace.losses.extend(self.step(number))
            trace.grads.extend(p.grad.clone() for p in flats if p.grad is not None)
            update(optimizer)
        trace.parameters.extend(p.detach().clone() for p in flats)
        trace.scales.extend(value for model in self.models for value in fp8_state(model).values())
        return trace


def _loss(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().mean()


def assert_same(*traces: Trace) -> None:
    assert traces[0].grads
    for other in traces[1:]:
        for field in Trace._fields:
            assert same(getattr(traces[0], field), getattr(other, field)), field


@pytest.mark.parametrize(("schedule", "world_size"), [(Schedule1F1B, 4), (ScheduleInterleaved1F1B, 2)])
@on_ranks()
def test_weights_stored_in_fp8(schedule: type) -> None:
    mesh = mesh_of(pp=2, tp=1)
    traces = []
    for flag, reshard, weights in ((0, 1, CURRENT), (1, 1, CURRENT), (1, 0, CURRENT), (1, 1, "in_layers")):
        pipeline = Pipeline(
            schedule,
            mesh,
            CURRENT,
            optimize_backward_concat=bool(flag),
            reshard_after_forward=bool(reshard),
            precision=Precision(compute=torch.bfloat16, fp8_weights=weights),
        )
        traces.append(pipeline.train())
        if weights is CURRENT and mesh.dp_size > 1:
            # One a step, and one when the schedule finds out about shapes.
            assert {model.fsdp_state.shared.ledger.calls["amax"] for model in pipeline.models} == {STEPS + 1}
    assert_same(*traces)


@SCHEDULES
@on_ranks(4)
def test_scales_are_those_of_a_stage_by_default(schedule: type) -> None:
    mesh = mesh_of(pp=2, tp=1)

    def around() -> AbstractContextManager[None]:
        return autocast(recipe=DELAYED, amax_reduction_group=mesh.stage_group)

    stages = 2 if schedule is ScheduleInterleaved1F1B else 1
    # In the forward: one reduction a forward and one a backward.  Around: one a step and one a backward.
    for options, in_a_step in (
        ({"recipe": DELAYED}, 2 * stages * MICROBATCHES),
        ({"around": around}, 1 + stages * MICROBATCHES),
    ):
        off = Pipeline(schedule, mesh, optimize_backward_concat=False, **options).train()
        on = Pipeline(schedule, mesh, **options)
        with counted_reductions() as calls:
            trace = on.train(STEPS - 1)
        before = sum(op == dist.ReduceOp.MAX for _, op in calls)
        with counted_reductions() as calls:
            on.step(STEPS - 1)
        again = Pipeline(schedule, mesh, static=True, **options)
        assert_same(off, again.train())
        assert trace.scales and before > len(calls)
        # And one a stage for what the step has used.
        expected = in_a_step + stages if mesh.dp_size > 1 else 0
        assert sum(op == dist.ReduceOp.MAX for _, op in calls) == expected
        # All that have a stage have its scales, whatever they were given.
        for scale in (scale for model in on.models for scale in fp8_state(model).values()):
            everyones = [torch.empty_like(scale) for _ in range(mesh.dp_size)]
            dist.all_gather(everyones, scale.contiguous(), group=mesh.dp_group)
            assert same(everyones, [scale] * mesh.dp_size)


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 1), ("1f1b", 2), ("interleaved", 2)])
@on_ranks()
def test_weights_are_cast_once_a_step(world_size: int, schedule: ScheduleName) -> None:
    config = LlamaConfig(4, 32, 64, heads=2, kv_heads=2, vocab=64, seq=16)
    mesh = make_mesh(pp=min(2, world_size))
    torch.manual_seed(3)
    batches = [tuple(torch.randint(0, 64, (2, 2, 16))) for _ in range(MICROBATCHES)]
    runs, uses_of_kept = [], []
    for cached in (False, True):
        model = LlamaPipeline(
            *(config, mesh, schedule),
            microbatches=MICROBATCHES,
            batch=2,
            recipe=CURRENT,
            cache_fp8_weights=cached,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        with patch.object(WeightCache, "find", autospec=True, side_effect=WeightCache.find) as find:
            for _ in range(STEPS):
                found += model.forward_backward(batches)
                found += [parameter.grad.clone() for parameter in model.parameters()]
                update(optimizer)
        runs.append(found)
        uses_of_kept.append(find.call_count)
    assert same(*runs)
    maps = sum(
        len(m.fp8_weights()) for stage in model.stages for m in stage.modules() if isinstance(m, MatmulLayer)
    )
    assert uses_of_kept == [0, STEPS * (MICROBATCHES - 1) * maps]


@on_ranks(4)
def test_regions_over_several_stages_are_refused() -> None:
    mesh = mesh_of(pp=2, tp=1)
    around = Pipeline(Schedule1F1B, mesh, around=lambda: autocast(recipe=DELAYED))
    with pytest.raises(ValueError, match="shares scales with ranks that have other stages"):
        around.step(0)
    # What reduces nothing is no problem.
    for recipe in (CURRENT, DelayedScaling(reduce_amax=False)):
        Pipeline(Schedule1F1B, mesh, around=lambda: autocast(recipe=recipe)).step(0)  # noqa: B023
    # In a forward, of which the first stage's is first: every rank raises, and none waits for another.
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        inside = Pipeline(schedule, mesh, DELAYED, dist.group.WORLD)
        if schedule is ScheduleInterleaved1F1B:
            # Its stages end at different times, so that the next step is the first that can raise.
            inside.step(0)
        with pytest.raises(ValueError, match="shares scales with ranks that have other stages"):
            inside.step(1)
        dist.barrier()
