"""Tensor-parallel layers in pipeline stages: several FlatFSDP modules a stage, and one checkpoint of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from flatfsdp import Precision, by_class, checkpoint, shard
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.whole.units import root_of
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama
from flatfsdp.optim import AdamW
from flatfsdp.parallel import FlatStage, clip_grad_norm_
from tests.support.checkpoints import equal
from tests.support.llamas import CONFIG, SmallPipeline, mesh_of, microbatches_of, samples
from tests.support.models import WIDTH, same, update, whole_grads
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tp_models import ParallelMLP

MICROBATCHES = 3


def part(ranks: Ranks, stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(*(ParallelMLP(ranks, fused=False) for _ in range(2)))


@on_ranks(4)
def test_several_flat_fsdp_modules_in_a_stage() -> None:
    """Each layer a root of its own, with nothing around them, or all below one root."""
    mesh = mesh_of(pp=2, tp=2)
    runs: list[tuple[dict[str, Tensor], Tensor]] = []
    for is_one, flag in ((True, False), (False, False), (False, True)):
        options: dict[str, Any] = {"mesh": mesh.dp, "tp_group": mesh.tp_group}
        options["optimize_backward_concat"] = flag
        module: nn.Module = part(Ranks.of(mesh.tp_group), mesh.pp_rank)
        if is_one:
            module = shard(module, by_class(ParallelMLP), **options)
        else:
            module = nn.Sequential(*(shard(layer, **options) for layer in module))
        stage = FlatStage(module, mesh.pp_rank, 2, group=mesh.pp_group)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda x, y: (x - y).square().mean())
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(9))
        schedule.step(*([x] if stage.is_first else []), target=x if stage.is_last else None)
        grads = whole_grads(module)
        runs.append((grads, clip_grad_norm_(stage, 0.1, mesh.pp_group)))
        assert runs[0][0].keys() == grads.keys()
        assert same([*runs[0][0].values()], [*grads.values()])
        torch.testing.assert_close(runs[0][1], runs[-1][1])
    whole = nn.Sequential(*(part(Ranks.of(None), stage) for stage in range(2)))
    for chunk in x.chunk(MICROBATCHES):
        ((whole(chunk) - chunk).square().mean() / MICROBATCHES).backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    torch.testing.assert_close(runs[0][1], norm, rtol=1e-5, atol=0)


RECIPE = DelayedScaling(amax_history_len=4)
BF16 = Precision(compute=torch.bfloat16)


def save(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    """Returns everything that this rank has of the whole model, whole over its tensor-parallel ranks."""
    mesh = mesh_of(pp=2, tp=2)
    pipeline = SmallPipeline("interleaved", mesh, recipe=RECIPE, sequence_parallel=True, precision=BF16)
    optimizer = AdamW(pipeline.parameters(), lr=1e-2, max_grad_norm=1.0, pp_group=mesh.pp_group)
    pipeline.forward_backward(microbatches_of(samples(mesh.dp_rank)[0]))
    optimizer.step()
    checkpoint.save(folder, pipeline.stages, optimizer)
    found = {k: v for stage in pipeline.stages for k, v in checkpoint.full_state_dict(stage).items()}
    assert any(key.endswith("fp8_backward_scale") for key in found)
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def load(rank: int, world_size: int, folder: str, expected: dict[str, Tensor]) -> None:
    for tp in (1, 2) if world_size > 1 else (1,):
        mesh = mesh_of(pp=1, tp=tp)
        options: dict[str, Any] = {"tp_group": mesh.tp_group} if tp > 1 else {}
        llama = Llama(CONFIG, seed=7, recipe=RECIPE, **options)
        model = shard(llama, by_class(TransformerLayer), mesh=mesh.dp, precision=BF16, **options)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        checkpoint.load(folder, model, optimizer)
        found = dict(checkpoint.full_state_dict(model))
        assert [key for key in expected if not equal(found[key], expected[key])] == []
        moments = checkpoint.full_optimizer_state_dict(model, optimizer)["state"]
        assert moments.keys() == dict(Llama(CONFIG).named_parameters()).keys()
        assert all(state["exp_avg_sq"].any() for state in moments.values())
        model(*samples(0)[0]).backward()


def test_a_split_and_staged_fp8_model_is_read_by_others(tmp_path: Path) -> None:
    parts = run_ranks(4, save, str(tmp_path))
    # Ranks of one tensor-parallel group have the same.
    assert equal(parts[0], parts[1]) and equal(parts[2], parts[3])
    expected = {**parts[0], **parts[2]}
    for world_size in (1, 2):
        run_ranks(world_size, load, str(tmp_path), expected)


@on_ranks(4)
def test_weights_of_split_layers_stored_in_fp8() -> None:
    """In the flat buffer a weight's scale is that of this rank's part, as in its layer."""
    mesh = mesh_of(pp=1, tp=2)
    states = []
    for flag, weights in ((False, "in_layers"), (False, CurrentScaling()), (True, CurrentScaling())):
        llama = Llama(
            CONFIG,
            recipe=CurrentScaling(),
            tp_group=mesh.tp_group,
            sequence_parallel=True,
            fuse_wgrad_accumulation=True,
        )
        model = shard(
            llama,
            by_class(TransformerLayer),
            mesh=mesh.dp,
            tp_group=mesh.tp_group,
            optimize_backward_concat=flag,
            precision=Precision(compute=torch.bfloat16, fp8_weights=weights),
        )
        optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for tokens, targets in samples(mesh.dp_rank):
            model(tokens, targets).backward()
            update(optimizer)
        states.append(dict(model.state_dict()))
        for group in (group for unit in root_of(model).units for group in unit.groups):
            assert group.operands.columnwise is None or group.layout.placement is Placement.SPLIT
    assert equal(states[0], states[1]) and equal(states[0], states[2])
