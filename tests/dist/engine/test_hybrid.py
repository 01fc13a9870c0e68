"""Hybrid sharding: parameters are sharded inside each row of a (replicate, shard) mesh, replicas agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import microbatches
from flatfsdp.engine.whole.units import named_groups
from tests.support.meshes import HYBRID
from tests.support.models import FLAGS, backward, build, data, each_policy, grads_of, same, train
from tests.support.ranks import of_all_ranks, on_ranks


@each_policy
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sync", ["last", "every"])
@on_ranks(4)
def test_bytes_inside_and_across(rank: int, sync: str, count: int, policy: Any) -> None:
    """A padded parameter of P elements in FP32, on a 2 x 2 mesh.

    Inside a row, reduce-scatter sends (2 - 1) / 2 of 4 bytes in each reducing backward.  Across rows, the
    all-reduce of the half that a rank holds sends 2 (2 - 1) / 2 of 4 / 2 bytes, once a step, whatever the
    number of microbatches.
    """
    model = build(grad_sync=sync, **HYBRID, **policy)
    ((*batches,),) = data(rank, 1, count)
    backward(model, batches)
    model.zero_grad()
    ledger = model.fsdp_state.shared.ledger
    ledger.reset()
    backward(model, batches)
    padded = sum(group.layout.padded_numel(2) for _, group in named_groups(model))
    backwards = count if sync == "every" else 1
    assert ledger.bytes["reduce"] / padded == pytest.approx(2.0 * backwards)
    assert ledger.bytes["all_reduce"] / padded == pytest.approx(2.0)


@FLAGS
@on_ranks(4)
def test_an_unfinished_step_leaves_no_partial_sum(rank: int, flag: bool) -> None:
    """Gradients that an unfinished step had reduced inside a row do not reach the next step."""
    options = {**HYBRID, "grad_sync": "every", "optimize_backward_concat": flag}
    model, fresh = build(**options), build(**options)
    unfinished, clean = data(rank, 2, 2)
    for tokens in microbatches(model, unfinished):
        model(tokens).backward()
        break
    for m in (model, fresh):
        backward(m, clean)
    assert same(grads_of(model), grads_of(fresh))
    with model.no_sync():
        model(clean[0]).backward()
    model.zero_grad()
    fresh.zero_grad()
    for m in (model, fresh):
        backward(m, clean)
    assert same(grads_of(model), grads_of(fresh))


@on_ranks(4)
def test_replicas_hold_equal_shards(rank: int) -> None:
    """Replicas that start from different weights, and ranks that train on different data."""
    model = build(seed=rank // 2, **HYBRID)
    train(model, rank)
    shards = of_all_ranks(torch.cat([p.detach() for p in model.parameters()]))
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])
