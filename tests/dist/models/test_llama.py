"""Pipelines of a Llama: flag off and on are the same bits, and one process's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from flatfsdp import Precision, by_class, microbatches, shard
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama, stage_layers
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.parallel import FlatStage, ParallelMesh
from tests.support.against_plain import assert_equal
from tests.support.llamas import (
    CONFIG,
    MICROBATCHES,
    SmallPipeline,
    Trace,
    in_one_process,
    mesh_of,
    microbatches_of,
    samples,
)
from tests.support.models import same, whole_grads
from tests.support.plain_layers import assert_near, error
from tests.support.ranks import on_ranks

BF16 = Precision(compute=torch.bfloat16)


def off_and_on(mesh: ParallelMesh, schedule: ScheduleName, **options: Any) -> Trace:
    off, on = (
        SmallPipeline(schedule, mesh, optimize_backward_concat=flag, **options).train()
        for flag in (False, True)
    )
    assert off.grads
    for field in ("losses", "grads", "parameters"):
        assert same(getattr(off, field), getattr(on, field)), (schedule, field, options)
    return on


def assert_close(trace: Trace, losses: list[Tensor], grads: dict[str, Tensor]) -> None:
    """To one process's."""
    if trace.losses:
        torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)
    assert_near(trace.first_grads, grads)


@pytest.mark.parametrize("tp", [1, 2], ids=["dp2-pp2", "tp2-pp2"])
@on_ranks(4)
def test_pipelines_are_one_process_and_the_flag_changes_no_bit(tp: int) -> None:
    """In FP32 as one process; in bf16 and FP8, too, the same bits flag off and on."""
    mesh = mesh_of(pp=2, tp=tp)
    losses, grads = in_one_process(mesh.dp_rank, mesh.dp_size)
    split = {"sequence_parallel": tp > 1}
    low: dict[ScheduleName, dict[str, Any]] = {
        "gpipe": {},
        "1f1b": {"recipe": CurrentScaling()},
        "interleaved": {"recipe": DelayedScaling(amax_history_len=4)},
    }
    for schedule in low:
        unfused = {"fuse_wgrad_accumulation": schedule != "gpipe"} if tp > 1 else {}
        on = off_and_on(mesh, schedule, **split, **unfused)
        assert on.first_grads.keys() < grads.keys()
        assert_close(on, losses, grads)
        # Interleaved stages where ranks share no layer, the other schedules where they do.
        if (schedule == "interleaved") == (tp == 1):
            off_and_on(mesh, schedule, **split, **low[schedule], reshard_after_forward=False, precision=BF16)


def without_a_pipeline(mesh: ParallelMesh, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and whole gradients of the first step, with all layers on each data-parallel rank."""
    plain = Llama(CONFIG, fuse_wgrad_accumulation=True, recipe=options.pop("recipe", None))
    model = shard(plain, by_class(TransformerLayer), mesh=mesh.dp, **options)
    losses = []
    for batch in microbatches(model, microbatches_of(samples(mesh.dp_rank)[0])):
        loss = model(*batch)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses, whole_grads(model)


@on_ranks(4)
def test_gradients_reduced_in_every_microbatch_are_those_of_no_pipeline() -> None:
    """With any schedule, flag off or on, bit for bit: a stage adds up its microbatches in their order."""
    mesh = mesh_of(pp=2, tp=1)
    fp8 = {"precision": Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())}
    cases: list[tuple[dict[str, Any], tuple[ScheduleName, ...]]] = [
        ({}, get_args(ScheduleName)),
        ({**fp8, "recipe": CurrentScaling()}, ("interleaved",)),
    ]
    for options, schedules in cases:
        losses, every = without_a_pipeline(mesh, **options, grad_sync="every")
        _, last = without_a_pipeline(mesh, **options)
        for schedule in schedules:
            found = off_and_on(mesh, schedule, **options, grad_sync="every")
            assert same(found.losses[:MICROBATCHES], losses if found.losses else [])
            assert_equal(found.first_grads, {name: every[name] for name in found.first_grads})
            # Ranks and microbatches are added in another order.
            assert not all(torch.equal(grad, last[name]) for name, grad in found.first_grads.items())
        default = SmallPipeline("1f1b", mesh, **options).train().first_grads
        assert_equal(default, {name: last[name] for name in default})


@pytest.mark.parametrize("world_size", [2, 4], ids=["tp2", "tp2-dp2"])
@on_ranks()
def test_tensor_and_data_parallel_ranks_are_one_process(world_size: int) -> None:
    mesh = mesh_of(pp=1, tp=2)
    losses, grads = in_one_process(mesh.dp_rank, mesh.dp_size)
    cases: tuple[dict[str, Any], ...] = (
        ({"sequence_parallel": False}, {"sequence_parallel": True})
        if world_size == 2
        else ({"sequence_parallel": True}, {"sequence_parallel": True, "grad_sync": "every"})
    )
    for options in cases:
        on = off_and_on(mesh, "1f1b", **options)
        assert on.losses and on.first_grads.keys() == grads.keys()
        assert_close(on, losses, grads)
    if world_size == 4:
        stored = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
        off_and_on(mesh, "1f1b", **cases[-1], precision=stored, recipe=CurrentScaling())


@pytest.mark.parametrize("pp", [1, 2], ids=["tp2", "pp2"])
@on_ranks(2)
def test_an_evaluation_between_steps_leaves_no_trace(world_size: int, pp: int) -> None:
    """Evaluates before the first step and between steps: losses are those of a step, and no trace is left."""
    mesh = mesh_of(pp=pp, tp=world_size // pp)
    (first, _), interleaved = samples(mesh.dp_rank), "interleaved" if pp > 1 else "1f1b"
    cases: tuple[tuple[ScheduleName, dict[str, Any]], ...] = (
        ("1f1b", {}),
        (interleaved, {"recipe": DelayedScaling(amax_history_len=4), "cache_fp8_weights": True}),
        ("1f1b", {"recipe": CurrentScaling(), "precision": Precision(fp8_weights=CurrentScaling())}),
    )
    for schedule, options in cases:
        watched, alone = (SmallPipeline(schedule, mesh, **options) for _ in range(2))
        batches = microbatches_of(first)
        for _ in range(2):
            before = watched.evaluate(batches)
            assert len(before) == (MICROBATCHES if watched.has_last else 0)
            assert not any(loss.requires_grad for loss in before)
            trained, expected = watched.forward_backward(batches), alone.forward_backward(batches)
            assert same(trained, expected)
            # Delayed scales move on with each microbatch of a step.
            assert same(before, trained) or "cache_fp8_weights" in options
            for parameter in (*watched.parameters(), *alone.parameters()):
                with torch.no_grad():
                    parameter -= 0.3 * parameter.grad
                parameter.grad = None
            assert same([*watched.parameters()], [*alone.parameters()])


@on_ranks(4)
def test_scales_are_the_stages_and_a_run_that_finds_out_shapes_leaves_them_alone() -> None:
    mesh = mesh_of(pp=2, tp=2)
    options = {"recipe": DelayedScaling(amax_history_len=4), "sequence_parallel": True, "precision": BF16}
    known, found = (SmallPipeline("1f1b", mesh, **options) for _ in range(2))
    (model,) = found.stages
    # By default the ranks that have a stage share its scales.
    model.amax_group = None
    stage = FlatStage(model, mesh.pp_rank, mesh.pp_size, group=mesh.pp_group)
    found._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=model.loss)
    expected, trace = known.train(), found.train()
    for field in ("losses", "grads", "parameters"):
        assert same(getattr(trace, field), getattr(expected, field)), field


def joined(part: Tensor, like: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """The whole of what each rank of `group` has a part of; `like`: the parameter, which says how."""
    size = dist.get_world_size(group)
    if size == 1 or not like.tensor_model_parallel:  # type: ignore[attr-defined]
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    dim, sizes = like.partition_dim, like.partition_sizes  # type: ignore[attr-defined]
    pieces = [of_rank.split([n // size for n in sizes], dim) for of_rank in parts]
    return torch.cat([of_rank[k] for k in range(len(sizes)) for of_rank in pieces], dim)


FOUR_GROUPS = replace(CONFIG, kv_heads=4)


@on_ranks(4)
def test_initial_values_depend_neither_on_tp_nor_on_pp(rank: int) -> None:
    whole = dict(Llama(FOUR_GROUPS, seed=3).named_parameters())
    for tp in (1, 2, 4):
        group = mesh_of(pp=1, tp=tp).tp_group
        for stages in (1, 2):
            torch.manual_seed(rank)
            parts = [Llama(FOUR_GROUPS, x, seed=3, tp_group=group) for x in stage_layers(4, stages)]
            named = [pair for part in parts for pair in part.named_parameters()]
            assert [name for name, _ in named] == list(whole)
            for name, parameter in named:
                assert torch.equal(joined(parameter.detach(), parameter, group), whole[name]), (name, tp)


@on_ranks(2)
def test_flatfsdp_gives_values_to_what_was_built_on_meta() -> None:
    flats = []
    for device in ("cpu", "meta"):
        model = Llama(CONFIG, range(2, 4), seed=3, device=device)
        wrapped = shard(model, by_class(TransformerLayer), device="cpu", param_init_fn=model.initialize)
        flats.append([p.detach() for p in wrapped.parameters()])
    assert same(*flats)


@on_ranks(2)
def test_tensor_and_sequence_parallel_losses_and_gradients_are_the_whole_models(world_size: int) -> None:
    """Without FlatFSDP, which would sum what norms see of the sequence."""
    (tokens, targets), _ = samples(0)
    whole = Llama(CONFIG)
    expected = whole(tokens, targets)
    expected.backward()
    group = dist.group.WORLD
    for sequence_parallel in (False, True):
        part = Llama(CONFIG, tp_group=group, sequence_parallel=sequence_parallel)
        logits = part(tokens)
        assert logits.shape == (CONFIG.seq, len(tokens), CONFIG.vocab // world_size)
        loss = part(tokens, targets)
        assert torch.equal(loss, part.loss(logits, targets))
        assert abs(loss - expected) < 1e-6 * expected
        loss.backward()
        for name, parameter in part.named_parameters():
            grad = parameter.grad
            if parameter.sequence_parallel:
                dist.all_reduce(grad)
            exact = whole.get_parameter(name).grad
            assert error(joined(grad, parameter, group), exact) < 1e-5, name


@on_ranks(4)
def test_sizes_that_ranks_cannot_share_are_refused_on_every_rank(rank: int) -> None:
    # Also where others have the embedding and the head.
    layers = range(rank, rank + 1)
    for sizes, message in (
        ({"vocab": 50}, "Llama: vocab is 50, which 4"),
        ({"ffn": 90}, "LayerNormMLP: ffn_hidden_size is 90, which 4"),
        ({}, "num_gqa_groups is 2, which 4"),
    ):
        config = replace(CONFIG, **{"kv_heads": 4 if sizes else 2, **sizes})
        with pytest.raises(ValueError, match=message):
            Llama(config, layers, tp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="tp_overlap cuts what sequence_parallel=True sends"):
        Llama(replace(CONFIG, kv_heads=4), tp_group=dist.group.WORLD, tp_overlap=True)


@on_ranks(2)
def test_replayed_microbatches_are_the_eager_ones() -> None:
    """On CPUs they are eager, but go through the same function."""
    mesh = mesh_of(pp=1, tp=1)
    first, _ = samples(mesh.dp_rank)
    runs = []
    for replay in (False, True):
        model = SmallPipeline("1f1b", mesh, replay=replay)
        losses = model.forward_backward(microbatches_of(first))
        runs.append((losses, [parameter.grad.as_subclass(Tensor) for parameter in model.parameters()]))
    (eager, eager_grads), (replayed, replayed_grads) = runs
    assert len(replayed) == MICROBATCHES and not any(loss.requires_grad for loss in replayed)
    assert same(eager, replayed) and same(eager_grads, replayed_grads)


@on_ranks(2)
def test_what_cannot_be_replayed_is_refused_on_every_rank() -> None:
    cached = {"recipe": DelayedScaling(amax_history_len=4), "cache_fp8_weights": True}
    for ranks, options, message in (
        ({"pp": 2, "tp": 1}, {}, "replay with 2 pipeline ranks"),
        ({"pp": 1, "tp": 2}, {}, "replay with 2 tensor-parallel ranks"),
        ({"pp": 1, "tp": 1}, cached, "cache_fp8_weights"),
    ):
        with pytest.raises(ValueError, match=message):
            SmallPipeline("1f1b", mesh_of(**ranks), replay=True, **options)
