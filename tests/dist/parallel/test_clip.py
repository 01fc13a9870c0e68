"""The gradient norm of models whose layers are split, and of models in stages: that of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from flatfsdp import Precision, param_groups, shard
from flatfsdp.layers import Linear
from flatfsdp.optim import SGD, AdamW
from flatfsdp.parallel import clip_grad_norm_
from tests.support.models import data, plain_net, whole_grads
from tests.support.pipelines import MICROBATCHES, Pipeline, loss_of, parts, tokens_of
from tests.support.ranks import on_ranks
from tests.support.tp_models import ParallelNet, build_tp, data_rank, tp_mesh

NORMS = [2.0, 1.0, math.inf]


def same_on_all_ranks(value: Tensor) -> bool:
    everyones = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, value)
    return all(torch.equal(each, value) for each in everyones)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2), (1, 4)], ids=["dp2-tp2", "hybrid", "tp4"])
@on_ranks(4)
def test_a_norm_counts_each_gradient_once(world_size: int, sizes: tuple[int, ...], norm_type: float) -> None:
    mesh = tp_mesh(*sizes)
    model = build_tp(mesh)
    batches = [next(data(r, 1, 1))[0] for r in range(world_size // mesh["tp"].size())]
    model(batches[data_rank(mesh)]).backward()
    plain = plain_net(ParallelNet)
    for tokens in batches:
        (plain(tokens) / len(batches)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    norm = model.clip_grad_norm_(0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert same_on_all_ranks(norm)
    grads = whole_grads(model)  # Also checks that what all ranks have is still equal.
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("in_groups", "sizes"), [(False, (2, 2)), (True, (2, 2)), (False, (2, 1, 2))])
@on_ranks(4)
def test_clipping_in_the_step_is_clipping_before_it(in_groups: bool, sizes: tuple[int, ...]) -> None:
    mesh = tp_mesh(*sizes)
    fused, apart = build_tp(mesh), build_tp(mesh)
    groups: list[Any] = [list(model.parameters()) for model in (fused, apart)]
    if in_groups:
        # Some shards hold nothing of a group; some ranks do not count what they hold.
        groups = [
            param_groups(model, [{"params": lambda name, shape: "bias" in name, "weight_decay": 0.5}])
            for model in (fused, apart)
        ]
    optimizer, plain = AdamW(groups[0], lr=0.1, max_grad_norm=0.1), AdamW(groups[1], lr=0.1)
    for (tokens,) in data(data_rank(mesh), 2, 1):
        for model in (fused, apart):
            model(tokens).backward()
        norm = apart.clip_grad_norm_(0.1)
        optimizer.step()
        plain.step()
        assert norm > 0.1
        # Groups cut a unit into runs, whose norms are rounded one by one.
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6 if in_groups else 0, atol=0)
        for each in (optimizer, plain):
            each.zero_grad()
    for ours, theirs in zip(fused.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if in_groups else 0, atol=1e-6 if in_groups else 0)


@on_ranks(4)
def test_dtypes_of_norms_and_parameters_outside_of_flat_fsdp() -> None:
    mesh = tp_mesh(2, 2)
    options = {"mesh": mesh["dp"], "tp_group": mesh.get_group("tp")}
    # One rank of each tensor-parallel group counts nothing, in FP64.
    wide = shard(nn.Linear(3, 3), precision=Precision(*[torch.float64] * 4), **options)
    wide(torch.ones(2, 3)).sum().backward()
    expected = torch.tensor(3 * (3 * 4 + 4.0), dtype=torch.float64).sqrt()
    norm = wide.clip_grad_norm_(0.5)
    assert torch.equal(norm, expected) and same_on_all_ranks(norm)
    layer = Linear(4, 8, parallel_mode="column", tp_group=mesh.get_group("tp"))
    layer(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = SGD(layer.parameters(), lr=0.1, max_grad_norm=0.1)
    with pytest.raises(ValueError, match="no rank knows the norm; shard the layer, or clip"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
    optimizer.max_grad_norm = None
    optimizer.step()


@pytest.mark.parametrize(("schedule", "world_size"), [(Schedule1F1B, 4), (ScheduleInterleaved1F1B, 2)])
@on_ranks()
def test_the_norm_of_a_pipeline_is_that_of_all_stages(rank: int, world_size: int, schedule: type) -> None:
    dp = world_size // 2
    pipelines = [Pipeline(schedule, 2, dp) for _ in range(2)]
    pipeline, again = pipelines
    replica = pipeline.mesh.get_local_rank("dp")
    for each in pipelines:
        each.step(tokens_of(replica, 1)[0])
    plain = parts(1)[0]
    for of_replica in range(dp):
        for part in tokens_of(of_replica, 1)[0].chunk(MICROBATCHES):
            (loss_of(plain(part), part) / MICROBATCHES / dp).backward()
    flats = [p for model in again.models for p in model.parameters()]
    pp_group = pipeline.mesh.get_group("pp")
    # The stages have said which ranks have the others.
    optimizer = SGD(flats, lr=0.1, max_grad_norm=0.1)
    optimizer.step()
    for norm_type in NORMS:
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        before = pipeline.grads()
        norm = clip_grad_norm_(pipeline.models, 1e9, pp_group, norm_type)
        assert all(torch.equal(*pair) for pair in zip(before, pipeline.grads(), strict=True))
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"is a stage of a pipeline.* flatfsdp\.parallel\.clip_grad_norm_"):
        pipeline.models[0].clip_grad_norm_(0.1)
    norm = clip_grad_norm_(pipeline.stages, 0.1)
    assert same_on_all_ranks(norm)
    assert torch.equal(norm, optimizer.grad_norm)
    torch.testing.assert_close(clip_grad_norm_(pipeline.stages, 1.0, pp_group), torch.tensor(0.1))
    if rank < dp:
        next(p for p in pipeline.models[0].parameters() if p.grad is not None).grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="the gradient norm is nan"):
        clip_grad_norm_(pipeline.stages, 0.1, pp_group, math.inf, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="got no stages"):
        clip_grad_norm_([], 0.1, pp_group)
