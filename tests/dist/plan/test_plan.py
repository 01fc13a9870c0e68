"""The plan of a step, against the step: buffers, saved activations, gradients and what is sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.lib.copy_counter import CopyCounter
from flatfsdp import Precision
from flatfsdp.engine.whole.memory import MemoryReport, buffers_of
from flatfsdp.engine.whole.units import units_in
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.optim import AdamW
from flatfsdp.parallel import FlatStage, ParallelMesh, make_mesh
from flatfsdp.plan import Job, Machine, Parallelism, Sent
from flatfsdp.plan.memory import in_flight
from flatfsdp.plan.stages import Stage, Tracer
from flatfsdp.plan.time import sent_by
from flatfsdp.plan.trace.live_memory import allocated
from flatfsdp.plan.trace.step import GRADIENT, REST
from tests.support.programs import run_program
from tests.support.ranks import run_ranks

# Odd enough to need padding.
CONFIG = LlamaConfig(4, 48, 80, heads=4, kv_heads=2, vocab=36, seq=16)
FP8_CONFIG = LlamaConfig(4, 64, 96, heads=4, kv_heads=2, vocab=48, seq=16)
FP32, BF16 = Precision(), Precision(compute=torch.bfloat16)
FP8, IN_LAYERS = (replace(BF16, fp8_weights=how) for how in (CurrentScaling(), "in_layers"))
DELAYED = DelayedScaling(amax_history_len=4)


def mesh_of(ranks: Parallelism) -> ParallelMesh:
    return make_mesh(
        pp=ranks.pp, dp_replicate=ranks.dp_replicate, dp_shard=ranks.dp_shard, tp=ranks.tp, device_type="cpu"
    )


def pipeline_of(job: Job, mesh: ParallelMesh) -> LlamaPipeline:
    return LlamaPipeline(
        job.model,
        mesh,
        job.schedule,
        microbatches=job.microbatches,
        batch=job.batch,
        stages_per_rank=job.stages_per_rank,
        precision=job.dtypes,
        sequence_parallel=job.ranks.sequence_parallel,
        recipe=job.recipe,
        reshard_after_forward=job.reshard_after_forward,
        grad_sync=job.grad_sync,
    )


# -- memory of parameters and gradients ------------------------------------------------------------------


@contextmanager
def world(size: int, rank: int) -> Iterator[None]:
    """One process is one rank of many; what it would receive is undefined."""
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows_of(report: MemoryReport) -> Counter[str]:
    """Bytes by buffer and dtype of what is always there."""
    found: Counter[str] = Counter()
    for row in report.rows:
        if row.lives == "always":
            found[f"{row.buffer}, {str(row.dtype).removeprefix('torch.')}"] += row.total
    return found


def without_step_counts(rows: Mapping[str, int]) -> dict[str, int]:
    """Rows of what a GPU has: AdamW counts its steps on the host."""
    moments = 2 * rows["master shard, float32"]
    assert 0 < rows["optimizer state, float32"] - moments < 512
    return {**rows, "optimizer state, float32": moments, REST: 0}


WAYS: list[tuple[Parallelism, dict[str, Any]]] = [
    (Parallelism(), {}),
    (Parallelism(dp_shard=3), {}),
    (Parallelism(dp_replicate=2, dp_shard=4), {"reshard_after_forward": False}),
    (Parallelism(dp_shard=2, tp=2), {}),
    (Parallelism(dp_shard=3, tp=2, sequence_parallel=True), {}),
    (Parallelism(pp=3, dp_shard=2), {}),
    (Parallelism(pp=2, dp_shard=2, tp=2, sequence_parallel=True), {"schedule": "interleaved"}),
]
"""Ranks, and further arguments of `Job`."""


@pytest.mark.parametrize(("ranks", "more"), WAYS, ids=str)
def test_buffers_are_those_of_the_memory_report(ranks: Parallelism, more: dict[str, Any]) -> None:
    for precision, recipe, config in (
        (FP32, None, CONFIG),
        (BF16, None, CONFIG),
        (BF16, DELAYED, FP8_CONFIG),
        (FP8, CurrentScaling(), FP8_CONFIG),
        (IN_LAYERS, CurrentScaling(), FP8_CONFIG),
    ):
        job = Job(config, ranks, microbatches=4, precision=precision, recipe=recipe, **more)
        for pp_rank, stages in enumerate(Tracer(Machine()).stages(job)):
            with world(ranks.world, pp_rank * ranks.world // ranks.pp):
                pipeline = pipeline_of(job, mesh_of(ranks))
                optimizer = AdamW(pipeline.parameters())
                for flat in pipeline.parameters():
                    flat.grad = torch.zeros_like(flat)
                optimizer.step()
                for planned, stage in zip(stages, pipeline.stages, strict=True):
                    measured = without_step_counts(rows_of(stage.memory_report(optimizer)))
                    assert without_step_counts(planned.trace.static) == measured


# -- activations -----------------------------------------------------------------------------------------


def saved_bytes(job: Job, mesh: ParallelMesh) -> int:
    """What autograd keeps of one forward: memory that is neither a parameter's nor a table of positions."""
    pipeline = pipeline_of(job, mesh)
    (stage,) = pipeline.stages
    groups = [group for _, unit in units_in(stage) for group in unit.fsdp_state.groups]
    others = [group.compute_shard.tensor for group in groups]
    others += [group.buffer.tensor for group in groups if group.buffer is not None]
    others += [group.operands.columnwise.tensor for group in groups if group.operands.columnwise]
    others += stage.rotary(job.model.seq, torch.device("cpu"))[:2]
    known = {tensor.untyped_storage()._cdata for tensor in others}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Scales of whole tensors are single numbers.
        if tensor.numel() > 1 and storage._cdata not in known:
            found[storage._cdata] = storage.nbytes()
        return tensor

    tokens, targets = (torch.randint(0, job.model.vocab, (job.batch, job.model.seq)) for _ in range(2))
    kept = []
    with saved_tensors_hooks(note, lambda tensor: tensor):
        # Storages must not be used again while they are counted.
        kept.append(stage(tokens, targets))
    return sum(found.values()) - tokens.nbytes


def saved_jobs(world_size: int) -> list[Job]:
    config = replace(FP8_CONFIG, seq=512)
    return [
        # One layer or three.
        Job(replace(config, layers=1 + 2 * ((row + column) % 2)), ranks, 2, 1, precision, recipe)
        for row, ranks in enumerate(
            (
                Parallelism.over(world_size),
                Parallelism.over(world_size, tp=2),
                Parallelism.over(world_size, tp=2, sequence_parallel=True),
            )
        )
        for column, (precision, recipe) in enumerate(RECIPES)
    ]


def saved_as_planned(rank: int, world_size: int, planned: list[int]) -> None:
    for job, expected in zip(saved_jobs(world_size), planned, strict=True):
        # Scales take whole blocks of memory.
        saved = saved_bytes(job, mesh_of(job.ranks))
        assert saved == pytest.approx(expected, rel=0.02, abs=0), (job, saved, expected)


RECIPES: list[tuple[Precision, Recipe | None]] = [
    (FP32, None),
    (BF16, None),
    (BF16, DELAYED),
    (FP8, DELAYED),
    (FP8, CurrentScaling()),
    (IN_LAYERS, CurrentScaling()),
    (BF16, BlockScaling()),
]


def test_activations_are_what_autograd_saves() -> None:
    tracer = Tracer(Machine())
    traces = [tracer.stages(job)[0][0].trace for job in saved_jobs(2)]
    run_ranks(2, saved_as_planned, [trace.waiting[0]["activations"] for trace in traces])


# -- what is sent, and what is in flight -----------------------------------------------------------------


class Watched(NamedTuple):
    """One step: the engine's ledger, bytes of all collectives, and what stages send each other; for each of
    the rank's stages, microbatches that it held between forward and backward, at most at a time, and bytes of
    gradients that it had at the beginning of each backward, unreduced and summed over shards."""

    ledger: Counter[str]
    collectives: float
    pp: int
    in_flight: list[int]
    gradients: list[list[tuple[int, int]]]


def watch_step(job: Job, mesh: ParallelMesh) -> Watched:
    pipeline = pipeline_of(job, mesh)
    shape = (job.batch, job.model.seq)
    batches = [tuple(torch.randint(0, job.model.vocab, (2, *shape))) for _ in range(job.microbatches)]
    for stage in pipeline.stages:
        stage.memory_report()  # replicas become equal, which is sent once
    if job.ranks.pp > 1:
        pipeline.evaluate(batches)  # a new schedule is compared, which is sent once
    before = sum((stage.fsdp_state.shared.ledger.bytes for stage in pipeline.stages), Counter[str]())
    gradients: list[list[tuple[int, int]]] = [[] for _ in pipeline.stages]
    for stage, noted in zip(pipeline.stages, gradients, strict=True):
        stage.register_forward_hook(partial(watch_gradients, noted))
    sent, held, largest = 0, Counter[int](), list[int]()

    def sending(operations: Callable[..., list[dist.P2POp]]) -> Callable[..., list[dist.P2POp]]:
        def counted(stage: FlatStage, chunk: int) -> list[dist.P2POp]:
            nonlocal sent
            found = operations(stage, chunk)
            sent += sum(each.tensor.nbytes for each in found)
            return found

        return counted

    def forward(stage: FlatStage, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        held[stage.stage_index] += 1
        if held.total() > sum(largest):
            largest = [held[number] for number in pipeline.numbers]
        return forwards(stage, *args, **kwargs)

    def backward(stage: FlatStage, *args: Any, **kwargs: Any) -> None:
        held[stage.stage_index] -= 1
        backwards(stage, *args, **kwargs)

    forwards, backwards = FlatStage.forward_one_chunk, FlatStage.backward_one_chunk
    with ExitStack() as stack:
        for name, replacement in {
            "get_fwd_send_ops": sending(FlatStage.get_fwd_send_ops),
            "get_bwd_send_ops": sending(FlatStage.get_bwd_send_ops),
            "forward_one_chunk": forward,
            "backward_one_chunk": backward,
        }.items():
            stack.enter_context(mock.patch.object(FlatStage, name, replacement))
        counter = stack.enter_context(CopyCounter(min_numel=0))
        pipeline.forward_backward(batches)
    ledger = sum((stage.fsdp_state.shared.ledger.bytes for stage in pipeline.stages), Counter[str]()) - before
    collectives = sum(each.wire for each in counter.collectives if each.name != "identity")
    return Watched(ledger, collectives, sent, largest, gradients)


def watch_gradients(noted: list[tuple[int, int]], stage: Any, _inputs: Any, output: Tensor) -> None:
    groups = [group for _, unit in units_in(stage) for group in unit.fsdp_state.groups]

    def note(_: Tensor) -> None:
        buffers = [tensor for group in groups for name, tensor in buffers_of(group) if name == "main_grad"]
        sums = [group.partial_grad.so_far for group in groups if group.partial_grad.so_far is not None]
        noted.append(
            (sum(allocated(each.nbytes) for each in buffers), sum(allocated(each.nbytes) for each in sums))
        )

    output.register_hook(note)


EVERY = {"grad_sync": "every"}
Ways = list[tuple[Parallelism, dict[str, Any]]]


def jobs_of(ways: Ways) -> list[Job]:
    return [
        Job(config, ranks, batch=2, microbatches=4, precision=precision, recipe=recipe, **more)
        for ranks, more in ways
        for precision, recipe, config in ((BF16, None, CONFIG), (FP8, DELAYED, FP8_CONFIG))
    ]


Planned = tuple[Sent, list[list[tuple[int, int]]]]
"""What a pipeline rank sends, and gradients of each of its stages as in `Watched`."""


def planned_sent(ways: Ways) -> list[list[Planned]]:
    """What each pipeline rank sends and has, of each job."""
    tracer = Tracer(Machine())
    return [
        [(sent_by(job, stages), [*map(gradients_of, stages)]) for stages in tracer.stages(job)]
        for job in jobs_of(ways)
    ]


def gradients_of(stage: Stage) -> list[tuple[int, int]]:
    each = [(held.get("main_grad", 0), held.get(GRADIENT, 0)) for held in stage.trace.waiting]
    return [found for found, times in zip(each, stage.times, strict=True) for _ in range(times)]


def sent_as_planned(rank: int, world_size: int, ways: Ways, all_planned: list[list[Planned]]) -> None:
    for job, by_rank in zip(jobs_of(ways), all_planned, strict=True):
        mesh = mesh_of(job.ranks)
        step, (planned, gradients) = watch_step(job, mesh), by_rank[mesh.pp_rank]
        case = str(job)
        for kind in ("gather", "reduce", "all_reduce", "tp_all_reduce"):
            assert getattr(planned, kind) == step.ledger[kind], (kind, case)
        assert planned.pp == step.pp, case
        for found, expected in zip(step.gradients, gradients, strict=True):
            assert found == expected, case
        # Amaxes are sent, too.
        exactness = 0.02 if job.recipe else 1e-9
        sent = planned.total - planned.pp
        assert step.collectives == pytest.approx(sent, rel=exactness, abs=0), case
        assert job.ranks.pp == 1 or in_flight(job, mesh.pp_rank) == step.in_flight, case


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        *(
            (Parallelism(dp_shard=n), {"reshard_after_forward": frees})
            for n in (1, 3)
            for frees in (True, False)
        ),
        *((Parallelism(dp_shard=3), {"reshard_after_forward": frees, **EVERY}) for frees in (True, False)),
        *((Parallelism(dp_replicate=2, dp_shard=4), more) for more in ({}, EVERY)),
        (Parallelism(tp=2), {}),
        (Parallelism(tp=2, sequence_parallel=True), {}),
        *(
            (Parallelism(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=True), more)
            for more in ({}, EVERY)
        ),
    ],
    ids=str,
)
def test_what_is_sent(ranks: Parallelism, more: dict[str, Any]) -> None:
    ways = [(ranks, more)]
    planned = planned_sent(ways)
    with world(ranks.world, 0):
        sent_as_planned(0, ranks.world, ways, planned)


def test_what_a_pipeline_sends_and_has_in_flight() -> None:
    both, all_four = Parallelism(pp=2, dp_shard=2), Parallelism(pp=4)
    pipelines: Ways = [
        (all_four, {"schedule": "gpipe"}),
        (both, {"reshard_after_forward": False}),
        (both, {"schedule": "interleaved", **EVERY}),
        (Parallelism(pp=2, tp=2, sequence_parallel=True), {"schedule": "interleaved"}),
    ]
    run_ranks(4, sent_as_planned, pipelines, planned_sent(pipelines))


# -- the benchmark ---------------------------------------------------------------------------------------


def test_the_benchmark_trains_what_it_plans(tmp_path: Path) -> None:
    done = run_program(
        *("benchmarks/plan.py", "--preset", "tiny", "--device", "cpu", "--steps", "1", "--warmup", "1"),
        *("--only", "tp-bf16", "--only", "gpipe-bf16", "--json", "--out", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    payload = json.loads(done.stdout)
    assert json.loads((tmp_path / "plan-tiny-2.json").read_text()) == payload
    assert [row["name"] for row in payload["rows"]] == ["gpipe-bf16", "tp-bf16"]
    assert all(row["ms"] > 0 and len(row["peak_gib"]) == 2 for row in payload["rows"])
