"""Pipelines of a Llama: flag off and on are the same bits, and one process's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from flatfsdp import Precision, auto_wrap, by_class
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama, stage_layers
from flatfsdp.parallel import ParallelMesh
from tests.dist.llamas import CONFIG, LlamaPipeline, Trace, in_one_process, joined, mesh_of, samples
from tests.dist.models import same
from tests.dist.ranks import run_ranks

BF16 = {"precision": Precision(compute=torch.bfloat16)}


def off_and_on(mesh: ParallelMesh, schedule: type, options: dict[str, Any], **fsdp: Any) -> Trace:
    off, on = (
        LlamaPipeline(schedule, mesh, options, optimize_backward_concat=flag, **fsdp).train()
        for flag in (False, True)
    )
    assert off.grads
    for field in ("losses", "grads", "parameters"):
        assert same(getattr(off, field), getattr(on, field)), (schedule.__name__, field, options, fsdp)
    return on


def pipelines(rank: int, world_size: int, tp: int) -> None:
    """In FP32 as one process; in bf16 and FP8, too, the same bits flag off and on."""
    mesh = mesh_of(pp=2, tp=tp)
    losses, grads = in_one_process(mesh.dp_rank, mesh.dp_size)
    fused: dict[str, Any] = {"fuse_wgrad_accumulation": True, "sequence_parallel": tp > 1}
    low: dict[type, dict[str, Any]] = {
        ScheduleGPipe: {},
        Schedule1F1B: {"recipe": CurrentScaling()},
        ScheduleInterleaved1F1B: {"recipe": DelayedScaling(amax_history_len=4)},
    }
    for schedule in low:
        for options in (fused, {}) if schedule is ScheduleGPipe and tp > 1 else (fused,):
            on = off_and_on(mesh, schedule, options)
            if on.losses:
                torch.testing.assert_close(torch.stack(on.losses), torch.stack(losses), rtol=1e-6, atol=0)
            assert on.first_grads.keys() < grads.keys()
            for name, grad in on.first_grads.items():
                assert (grad - grads[name]).norm() / grads[name].norm() < 1e-5, name
        off_and_on(mesh, schedule, {**fused, **low[schedule]}, reshard_after_forward=False, **BF16)


@pytest.mark.parametrize("tp", [1, 2], ids=["dp2-pp2", "tp2-pp2"])
def test_pipelines_are_one_process_and_the_flag_changes_no_bit(tp: int) -> None:
    run_ranks(4, pipelines, tp)


def finds_out_shapes(rank: int, world_size: int) -> None:
    mesh = mesh_of(pp=2, tp=2)
    options = {"recipe": DelayedScaling(amax_history_len=4), "sequence_parallel": True}
    found = LlamaPipeline(Schedule1F1B, mesh, options, **BF16).train()
    # By default the ranks that have a stage share its scales.
    options["amax_group"] = None
    known = LlamaPipeline(Schedule1F1B, mesh, options, knows_shapes=True, **BF16).train()
    for field in ("losses", "grads", "parameters"):
        assert same(getattr(found, field), getattr(known, field)), field


def test_scales_are_the_stages_and_a_run_that_finds_out_shapes_leaves_them_alone() -> None:
    run_ranks(4, finds_out_shapes)


FOUR_GROUPS = replace(CONFIG, kv_heads=4)


def starts_alike(rank: int, world_size: int) -> None:
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


def test_initial_values_depend_neither_on_tp_nor_on_pp() -> None:
    run_ranks(4, starts_alike)


def starts_late(rank: int, world_size: int) -> None:
    flats = []
    for device in ("cpu", "meta"):
        model = Llama(CONFIG, range(2, 4), seed=3, device=device)
        wrapped = auto_wrap(model, by_class(TransformerLayer), device="cpu", param_init_fn=model.initialize)
        flats.append([p.detach() for p in wrapped.parameters()])
    assert same(*flats)


def test_flatfsdp_gives_values_to_what_was_built_on_meta() -> None:
    run_ranks(2, starts_late)


def splits(rank: int, world_size: int) -> None:
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
            assert (joined(grad, parameter, group) - exact).norm() / exact.norm() < 1e-5, name


def test_tensor_and_sequence_parallel_losses_and_gradients_are_the_whole_models() -> None:
    run_ranks(2, splits)


def refuses(rank: int, world_size: int) -> None:
    for sizes, message in (
        ({"vocab": 50}, "Embedding: num_embeddings is 50, which 4"),
        ({"ffn": 90}, "LayerNormMLP: ffn_hidden_size is 90, which 4"),
        ({}, "num_gqa_groups is 2, which 4"),
    ):
        with pytest.raises(ValueError, match=message):
            Llama(replace(CONFIG, **{"kv_heads": 4 if sizes else 2, **sizes}), tp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="tp_overlap cuts what sequence_parallel=True sends"):
        Llama(replace(CONFIG, kv_heads=4), tp_group=dist.group.WORLD, tp_overlap=True)


def test_sizes_that_ranks_cannot_share_are_refused_on_every_rank() -> None:
    run_ranks(4, refuses)
