"""Pipeline stages: what is refused, and what an exception inside a step leaves behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action

from flatfsdp import Precision, by_class, shard
from flatfsdp.models import LlamaPipeline, pipeline
from flatfsdp.parallel import FlatStage
from tests.support.llamas import CONFIG
from tests.support.llamas import mesh_of as llama_mesh_of
from tests.support.models import FLAGS, RESHARD, Block, same
from tests.support.pipelines import MICROBATCHES, Pipeline, loss_of, mesh_of, parts, tokens_of
from tests.support.programs import forking
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_zero_bubble_schedules_are_refused_before_anything_is_sent(rank: int) -> None:
    for schedule in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV):
        with pytest.raises(NotImplementedError, match=f"{schedule.__name__} splits each backward"):
            Pipeline(schedule, 2)
    pipeline = Pipeline(ScheduleInterleaved1F1B, 2)
    # Nobody has told the stages, and all ranks know all orders.
    pipeline.schedule.pipeline_order[1].append(_Action.from_str("1I0"))
    if rank == 0:
        # The other rank sends and receives nothing.
        with pytest.raises(NotImplementedError, match="splits each backward"):
            pipeline.step(tokens_of(0)[0])
    with pytest.raises(NotImplementedError, match="use ScheduleGPipe"):
        pipeline.step(tokens_of(0)[0])


@on_ranks(2)
def test_mistakes_raise_at_construction_on_every_rank(rank: int) -> None:
    mesh = mesh_of(2, 1)
    options: dict[str, Any] = {"group": mesh.get_group("pp")}
    part = parts(2)[rank]
    with pytest.raises(ValueError, match="has no unit; shard it first"):
        FlatStage(part, rank, 2, **options)
    part.blocks[0] = shard(part.blocks[0], mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"parameter \w+.*\.\w+ of stage . is in no unit; shard the whole"):
        FlatStage(part, rank, 2, **options)
    model = shard(part, by_class(Block), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="one of input_args and output_args"):
        FlatStage(model, rank, 2, input_args=torch.empty(2, 7), **options)
    with pytest.raises(ValueError, match="Number of microbatches"):
        Schedule1F1B(FlatStage(model, rank, 2, **options), 1, loss_fn=loss_of)
    for index in (1 - rank, rank - 2):
        with pytest.raises(ValueError, match=f"stage {index} of 2 cannot be on rank {rank}"):
            FlatStage(model, index, 2, **options)
    with pytest.raises(ValueError, match="part of a larger sharded module"):
        FlatStage(model.blocks[1], rank, 2, **options)


def refused(rank: int, first: dict[str, Any], other: dict[str, Any], pp: int, tp: int) -> str:
    """What a LlamaPipeline raises if the last rank is given something else than the others."""
    last = rank == dist.get_world_size() - 1
    given: dict[str, Any] = {"config": {}, "microbatches": 4, "batch": 2} | (other if last else first)
    config = replace(CONFIG, **given.pop("config"))
    with pytest.raises(RuntimeError) as error:
        LlamaPipeline(config, llama_mesh_of(pp, tp), **given)
    return str(error.value)


def value_in(given: Any) -> Any:
    return value_in(next(iter(given.values()))) if isinstance(given, dict) else given


@on_ranks(2)
def test_ranks_that_are_told_other_models_all_raise(rank: int, world_size: int) -> None:
    for first, other, message in (
        ({"config": {"layers": 2}}, {"config": {"layers": 4}}, "config.layers={} of LlamaPipeline"),
        ({"config": {"ffn": 96}}, {"config": {"ffn": 64}}, "config.ffn={} of LlamaPipeline"),
        ({"config": {"seq": 16}}, {"config": {"seq": 32}}, "config.seq={} of LlamaPipeline"),
        ({"microbatches": 4}, {"microbatches": 2}, "microbatches={} of LlamaPipeline"),
        # This rank would have raised by itself, and left the other waiting.
        ({"microbatches": 4}, {"microbatches": 0}, "microbatches={} of LlamaPipeline"),
        ({"batch": 2}, {"batch": 1}, "batch={} of LlamaPipeline"),
        ({"seed": 0}, {"seed": 1}, "seed={} of LlamaPipeline"),
        ({"schedule": "1f1b"}, {"schedule": "gpipe"}, "schedule={} of LlamaPipeline"),
        ({"grad_sync": "last"}, {"grad_sync": "every"}, "grad_sync={} of LlamaPipeline"),
    ):
        ours, theirs = (message.format(repr(value_in(given))) for given in (first, other))
        expected = f"rank 0 has [{ours}] where rank {world_size - 1} has [{theirs}]"
        for pp, tp in ((world_size, 1), (1, world_size), (1, 1)):
            assert expected in refused(rank, first, other, pp, tp)
    # What may differ.
    options = {"device": torch.device("cpu"), "reshard_after_forward": rank == 0, "precision": Precision()}
    usual = {"device": "cpu", "precision": None}
    mesh = llama_mesh_of(world_size, 1)
    LlamaPipeline(CONFIG, mesh, microbatches=4, batch=2, **(options if rank == 0 else usual))


@on_ranks(4)
def test_ranks_of_all_dimensions_raise(rank: int) -> None:
    """Rank 3 shares no dimension of the mesh with rank 0; they differ by way of the others."""
    message = refused(rank, {}, {"config": {"ffn": 64}}, pp=2, tp=2)
    assert "rank 0 has [config.ffn=96 of LlamaPipeline] where rank 3 has [config.ffn=64" in message


@on_ranks(2)
def test_lanes_that_do_not_fit_raise_before_anything_is_built() -> None:
    for pp, tp, lanes, microbatches, error, message in (
        (2, 1, 2, 4, NotImplementedError, "lanes with 2 pipeline ranks"),
        (1, 2, 2, 4, NotImplementedError, "lanes with tensor parallelism"),
        (1, 1, 3, 6, ValueError, "lanes=3 over 2 ranks"),
        (1, 1, 4, 6, ValueError, "6 microbatches a step over 4 lanes"),
        (1, 1, 0, 4, ValueError, "lanes: number is 0"),
    ):
        with mock.patch.object(pipeline, "Llama", None), pytest.raises(error, match=message):
            LlamaPipeline(CONFIG, llama_mesh_of(pp, tp), microbatches=microbatches, batch=2, lanes=lanes)


class BoomError(RuntimeError):
    pass


def fail_at(count: int, where: str) -> Callable[..., None]:
    """A forward hook that raises in its `count`-th call, or in the backward of that."""
    calls = []

    def raise_boom(*_: Any) -> None:
        raise BoomError

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        calls.append(None)
        if len(calls) == count:
            output.register_hook(raise_boom) if where == "backward" else raise_boom()

    return hook


@RESHARD
@FLAGS
@pytest.mark.parametrize(
    ("pp", "where", "sync"),
    [
        (1, "forward", "last"),
        (1, "loss", "last"),
        (1, "backward", "last"),
        (1, "backward", "every"),
        (2, "backward", "last"),
    ],
)
@on_ranks(2)
def test_a_failed_microbatch_leaves_the_next_step_clean(
    rank: int, world_size: int, pp: int, where: str, sync: str, flag: bool, reshard: bool
) -> None:
    """Fails with one stage in its second microbatch; with two, in the first's last backward."""
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard, "grad_sync": sync}
    dp = world_size // pp
    pipeline, fresh = (Pipeline(Schedule1F1B, pp, dp, **options) for _ in range(2))
    first, failing, clean = tokens_of(rank % dp)
    pipeline.step(first)
    pipeline.zero_grad()
    if pp == 1 or rank == 0:
        hook = fail_at(2 if pp == 1 else MICROBATCHES, where)
        handle = pipeline.models[0].blocks[1].down.register_forward_hook(hook)
        if where == "loss":
            handle.remove()
            pipeline.loss = lambda logits, tokens: hook(None, None, logits) or loss_of(logits, tokens)
        with pytest.raises(RuntimeError) as error:
            pipeline.step(failing)
        assert isinstance(error.value, BoomError) or isinstance(error.value.__cause__, BoomError)
        handle.remove()
        pipeline.loss = loss_of
    else:
        pipeline.step(failing)
    pipeline.zero_grad()
    assert same(pipeline.step(clean), fresh.step(clean))
    assert fresh.grads()
    assert same(pipeline.grads(), fresh.grads())


def fail_on_one_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    pipeline = Pipeline(Schedule1F1B, 2)
    if rank == 1:
        pipeline.models[0].blocks[1].down.register_forward_hook(fail_at(2, "forward"))
    try:
        pipeline.step(tokens_of(0)[0])
    except BaseException as error:
        Path(f"{store}-{rank}").write_text(repr(error.__cause__ or error))
        raise


def test_an_exception_on_one_rank_ends_the_others() -> None:
    """No rank waits for the process group's time limit: the connection's other end is gone."""
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=fail_on_one_rank, args=(r, f"{folder}/store")) for r in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
        waited, failed = (Path(f"{folder}/store-{rank}").read_text() for rank in range(2))
        for process in processes:
            process.kill()
    assert codes == [1, 1]
    assert "BoomError" in failed and "onnection" in waited
