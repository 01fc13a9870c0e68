"""Gradients between reduction and optimizer: divide factors, scaler, wider dtypes, parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from flatfsdp import Precision, microbatches, param_groups, shard
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.optim import AdamW
from tests.support.models import FLAGS, build, data, grads_of, plain_net, same
from tests.support.ranks import of_all_ranks, on_ranks


def step(model: Any, rank: int, count: int = 2, scale: float = 1.0) -> None:
    ((*batches,),) = data(rank, 1, count)
    for tokens in microbatches(model, batches):
        (model(tokens) * scale).backward()


@FLAGS
@pytest.mark.parametrize("sync", ["last", "every"])
@on_ranks(1, 2, 4)
def test_divide_factors_replace_the_mean(rank: int, world_size: int, sync: str, flag: bool) -> None:
    """Powers of two, so that dividing before or after the sum rounds alike."""
    options = {"grad_sync": sync, "optimize_backward_concat": flag}
    if world_size == 4:
        options = {**options, "mesh": dist.init_device_mesh("cpu", (2, 2))}
    mean, split, summed, one_unit = (build(**options) for _ in range(4))
    split.set_gradient_divide_factors(2, world_size / 2)
    summed.set_gradient_divide_factors(1, 1)
    one_unit.set_gradient_divide_factors(1, 1, recurse=False)
    for model in (mean, split, summed, one_unit):
        step(model, rank)
    assert same(grads_of(split), grads_of(mean))
    assert same(grads_of(summed), [g * world_size for g in grads_of(mean)])
    by_name = zip(mean.named_parameters(), one_unit.named_parameters(), strict=True)
    for (name, ours), (_, theirs) in by_name:
        factor = 1 if name.startswith("blocks") else world_size
        assert torch.equal(plain(theirs.grad), plain(ours.grad) * factor)
    with pytest.raises(ValueError, match="cannot be divided by 0 after the sum"):
        mean.set_gradient_divide_factors(1, 0)


@on_ranks(2)
def test_dividing_before_the_sum_keeps_it_in_range(world_size: int) -> None:
    """A gradient near fp16's limit on each rank: the sum overflows unless it is divided before."""
    finite = []
    for factors in [(1, world_size), (world_size, 1)]:
        model = build(precision=Precision(reduce=torch.float16))
        model.set_gradient_divide_factors(*factors)
        step(model, 0, count=1, scale=3e5)
        finite.append(all(bool(grad.isfinite().all()) for grad in grads_of(model)))
    assert [False, True] in of_all_ranks(finite)


@FLAGS
@on_ranks(2)
def test_a_gradient_scaler_agrees_on_all_ranks(rank: int, flag: bool) -> None:
    """One rank's shard overflows: all ranks skip the step and halve the scale alike."""
    options = {"precision": Precision(compute=torch.float16), "optimize_backward_concat": flag}
    model, reference = build(**options), build(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.125)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, rank, scale=8.0)
    scaler.scale(torch.ones(()))
    if rank == 1:
        plain(list(model.parameters())[-1].grad)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert same(before, [p.detach() for p in model.parameters()])
    model.zero_grad()
    step(model, rank, scale=4.0)
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    step(reference, rank)
    torch.testing.assert_close(norm, reference.clip_grad_norm_(0.5), rtol=2e-3, atol=0)
    theirs.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-3, atol=1e-4)


@FLAGS
@on_ranks(1, 2, 4)
def test_parameter_groups_over_shards(flag: bool) -> None:
    """Per-parameter learning rates, over shards that end anywhere, equal the plain model's groups."""
    plain, model = plain_net(), build(optimize_backward_concat=flag)
    groups = [
        {"params": lambda name, shape: name.endswith("bias"), "lr": 0.5, "weight_decay": 0.1},
        {"params": ["blocks.1.down.weight", "head.weight", "head.bias"], "lr": 0.25},
        {"params": lambda name, shape: shape == (20,), "lr": 0.0},
    ]
    ours = torch.optim.SGD(param_groups(model, groups), lr=0.125, momentum=0.5)
    assert len(ours.param_groups) == 4
    chosen = [[], [], [], []]
    for name, p in plain.named_parameters():
        is_bias, listed = name.endswith("bias"), name in groups[1]["params"]
        chosen[0 if is_bias else 1 if listed else 2 if p.shape == (20,) else 3].append(p)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in [*groups, {}]]
    theirs = torch.optim.SGD(
        [{"params": p, **s} for p, s in zip(chosen, settings, strict=True)], lr=0.125, momentum=0.5
    )
    for seed in range(3):
        ((tokens,),) = data(seed, 1, 1)
        for m, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            m(tokens).backward()
        norm = model.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5), rtol=1e-5, atol=0)
        ours.step()
        theirs.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    model.zero_grad()
    assert all(p.grad is None for group in ours.param_groups for p in group["params"])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"lr": 1.0}], 'has no "params"'),
        ([{"params": ["head.wait"]}], "names 'head.wait', which is not a trained parameter"),
        ([{"params": lambda name, shape: False}], "selects no parameter"),
        ([{"params": "head.bias"}], "is the string 'head.bias'"),
        ([{"params": [torch.ones(1)]}], "something else than names"),
    ],
)
def test_senseless_groups_are_explained(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(build(), groups)


@pytest.mark.parametrize("norms", [(-1.0, 2.0), (1.0, 0.0)])
def test_senseless_norms_are_explained(norms: tuple[float, float]) -> None:
    model = build()
    step(model, 0)
    with pytest.raises(ValueError, match="make sense"):
        model.clip_grad_norm_(*norms)


def test_a_unit_with_two_paths_counts_once_in_the_norm() -> None:
    net = nn.Sequential()
    net.first = net.again = shard(nn.Linear(3, 3))
    model = shard(net)
    model(torch.ones(1, 3)).sum().backward()
    before = torch.cat(grads_of(model)).norm()
    torch.testing.assert_close(model.clip_grad_norm_(0.1), before)
    torch.testing.assert_close(torch.cat(grads_of(model)).norm(), torch.tensor(0.1))


def test_the_norm_of_narrow_gradients_does_not_overflow() -> None:
    precision = Precision(param=torch.float16, compute=torch.float16)
    model = shard(nn.Linear(4, 4, bias=False), precision=precision)
    model(torch.full((1, 4), 75.0)).sum().backward()
    assert model.clip_grad_norm_(1000.0) == 300.0
    assert grads_of(model)[0].max() == 75.0


@on_ranks(4)
def test_a_unit_over_fewer_ranks(rank: int) -> None:
    """Two pairs of ranks each have a unit to themselves: it trains apart, and the norm of all is unknown."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    expert = shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(pairs[rank // 2], "cpu"))
    torch.manual_seed(9)
    model = shard(nn.Sequential(nn.Linear(8, 8), expert))
    model(torch.full((2, 8), float(rank))).square().sum().backward()
    for clip in (lambda: model.clip_grad_norm_(1.0), AdamW(model.parameters(), max_grad_norm=1.0).step):
        with pytest.raises(ValueError, match="spread over 2 ranks, not 4"):
            clip()
    assert expert.clip_grad_norm_(1.0).isfinite()
