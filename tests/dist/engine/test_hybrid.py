"""Hybrid sharding: parameters are sharded inside each row of a (replicate, shard) mesh, replicas agree."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp import FlatFSDP, Precision, microbatches
from tests.support.models import build, data, grads_of, same, same_trace, train, train_unsharded
from tests.support.ranks import run_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
POLICIES = pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": reshard, "grad_sync": sync}
        for reshard in (True, False)
        for sync in ("last", "every")
    ],
    ids=["ZeRO-3, last", "ZeRO-3, every", "ZeRO-2, last", "ZeRO-2, every"],
)


@cache
def mesh() -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def off_and_on(rank: int, world_size: int, precision: Precision, options: dict[str, Any]) -> dict[str, bool]:
    traces = [
        train(build(mesh=mesh(), precision=precision, optimize_backward_concat=flag, **options), rank)
        for flag in (False, True)
    ]
    return same_trace(*traces)


@POLICIES
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_flag_on_equals_flag_off(compute: torch.dtype, options: dict[str, Any]) -> None:
    for equal in run_ranks(4, off_and_on, Precision(compute=compute), options):
        assert all(equal.values()), equal


def against_unsharded(rank: int, world_size: int, options: dict[str, Any]) -> None:
    losses, expected = train_unsharded(world_size)
    model = build(mesh=mesh(), **options)
    trace = train(model, rank)
    state = model.state_dict()
    for name, value in expected.items():
        error = (state[name] - value).norm() / value.norm()
        assert error < 1e-6, (name, error)
    if rank == 0:
        torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)


@FLAGS
@POLICIES
def test_fp32_equals_the_unsharded_model(options: dict[str, Any], flag: bool) -> None:
    run_ranks(4, against_unsharded, {**options, "optimize_backward_concat": flag})


def one_step(model: FlatFSDP, batches: list[torch.Tensor]) -> None:
    for tokens in microbatches(model, batches):
        model(tokens).backward()


def bytes_of_a_step(rank: int, world_size: int, options: dict[str, Any], count: int) -> dict[str, float]:
    model = build(mesh=mesh(), **options)
    ((*batches,),) = data(rank, 1, count)
    one_step(model, batches)
    model.zero_grad()
    model.ledger.reset()
    one_step(model, batches)
    padded = sum(p.numel() for p in model.parameters()) * 2
    return {kind: nbytes / padded for kind, nbytes in model.ledger.bytes.items()}


@FLAGS
@pytest.mark.parametrize("count", [1, 3])
@POLICIES
def test_bytes_inside_and_across(options: dict[str, Any], count: int, flag: bool) -> None:
    """A padded parameter of P elements in FP32, on a 2 x 2 mesh.

    Inside a row, reduce-scatter sends (2 - 1) / 2 of 4 bytes in each reducing backward.  Across rows, the
    all-reduce of the half that a rank holds sends 2 (2 - 1) / 2 of 4 / 2 bytes, once a step, whatever the
    number of microbatches.
    """
    for measured in run_ranks(4, bytes_of_a_step, {**options, "optimize_backward_concat": flag}, count):
        backwards = count if options["grad_sync"] == "every" else 1
        assert measured["reduce"] == pytest.approx(2.0 * backwards)
        assert measured["all_reduce"] == pytest.approx(2.0)


def abandoned_partial_sums(rank: int, world_size: int, flag: bool) -> None:
    """What a step that was never finished had reduced inside a row does not reach the next step."""
    options = {"mesh": mesh(), "grad_sync": "every", "optimize_backward_concat": flag}
    model, fresh = build(**options), build(**options)
    unfinished, clean = data(rank, 2, 2)
    for tokens in microbatches(model, unfinished):
        model(tokens).backward()
        break
    assert grads_of(model) == []
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


@FLAGS
def test_an_unfinished_step_leaves_no_partial_sum(flag: bool) -> None:
    run_ranks(4, abandoned_partial_sums, flag)


def replicas_agree(rank: int, world_size: int) -> torch.Tensor:
    """Ranks that start from different weights, and train on different data."""
    model = build(seed=rank, mesh=mesh(), optimize_backward_concat=True)
    train(model, rank)
    return model.flat_param.detach()


def test_replicas_hold_equal_shards() -> None:
    shards = run_ranks(4, replicas_agree)
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])
