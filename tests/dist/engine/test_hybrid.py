"""Hybrid sharding: parameters are sharded inside each row of a (replicate, shard) mesh, replicas agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp import Precision, microbatches
from flatfsdp.engine.whole.units import named_groups
from tests.support.models import (
    FLAGS,
    backward,
    build,
    data,
    grads_of,
    same,
    same_trace,
    train,
    train_unsharded,
)
from tests.support.plain_layers import error
from tests.support.ranks import cached_in_file, on_ranks, run_ranks

POLICIES = pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": reshard, "grad_sync": sync}
        for reshard in (True, False)
        for sync in ("last", "every")
    ],
    ids=["ZeRO-3, last", "ZeRO-3, every", "ZeRO-2, last", "ZeRO-2, every"],
)


@cached_in_file
def mesh() -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@POLICIES
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_flag_on_equals_flag_off(rank: int, compute: torch.dtype, options: dict[str, Any]) -> None:
    precision = Precision(compute=compute)
    traces = [
        train(build(mesh=mesh(), precision=precision, optimize_backward_concat=flag, **options), rank)
        for flag in (False, True)
    ]
    equal = same_trace(*traces)
    assert all(equal.values()), equal


@FLAGS
@POLICIES
@on_ranks(4)
def test_fp32_equals_the_unsharded_model(rank: int, world_size: int, options: Any, flag: bool) -> None:
    options = {**options, "optimize_backward_concat": flag}
    losses, expected = train_unsharded(world_size)
    model = build(mesh=mesh(), **options)
    trace = train(model, rank)
    state = model.state_dict()
    for name, value in expected.items():
        assert error(state[name], value) < 1e-6, name
    if rank == 0:
        torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)


def one_step(model: Any, batches: list[torch.Tensor]) -> None:
    backward(model, batches)


@FLAGS
@pytest.mark.parametrize("count", [1, 3])
@POLICIES
@on_ranks(4)
def test_bytes_inside_and_across(rank: int, options: dict[str, Any], count: int, flag: bool) -> None:
    """A padded parameter of P elements in FP32, on a 2 x 2 mesh.

    Inside a row, reduce-scatter sends (2 - 1) / 2 of 4 bytes in each reducing backward.  Across rows, the
    all-reduce of the half that a rank holds sends 2 (2 - 1) / 2 of 4 / 2 bytes, once a step, whatever the
    number of microbatches.
    """
    model = build(mesh=mesh(), optimize_backward_concat=flag, **options)
    ((*batches,),) = data(rank, 1, count)
    one_step(model, batches)
    model.zero_grad()
    model.fsdp_state.shared.ledger.reset()
    one_step(model, batches)
    padded = sum(group.layout.padded_numel(2) for _, group in named_groups(model))
    backwards = count if options["grad_sync"] == "every" else 1
    assert model.fsdp_state.shared.ledger.bytes["reduce"] / padded == pytest.approx(2.0 * backwards)
    assert model.fsdp_state.shared.ledger.bytes["all_reduce"] / padded == pytest.approx(2.0)


@FLAGS
@on_ranks(4)
def test_an_unfinished_step_leaves_no_partial_sum(rank: int, flag: bool) -> None:
    """Gradients that an unfinished step had reduced inside a row do not reach the next step."""
    options = {"mesh": mesh(), "grad_sync": "every", "optimize_backward_concat": flag}
    model, fresh = build(**options), build(**options)
    unfinished, clean = data(rank, 2, 2)
    for tokens in microbatches(model, unfinished):
        model(tokens).backward()
        break
    for m in (model, fresh):
        one_step(m, clean)
    assert same(grads_of(model), grads_of(fresh))
    with model.no_sync():
        model(clean[0]).backward()
    model.zero_grad()
    fresh.zero_grad()
    for m in (model, fresh):
        one_step(m, clean)
    assert same(grads_of(model), grads_of(fresh))


def replicas_agree(rank: int, world_size: int) -> torch.Tensor:
    """Replicas that start from different weights, and ranks that train on different data."""
    model = build(seed=rank // 2, mesh=mesh())
    train(model, rank)
    return torch.cat([p.detach() for p in model.parameters()])


def test_replicas_hold_equal_shards() -> None:
    shards = run_ranks(4, replicas_agree)
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])
