"""Layers that ranks share, sharded by FlatFSDP: stored FP8 weights, fused products, gradients of norms."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, microbatches, shard
from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.rng import seeded
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import TransformerLayer
from flatfsdp.parallel import ParallelMesh, make_mesh
from tests.support.models import update, whole_grads
from tests.support.plain_layers import assert_near
from tests.support.ranks import on_ranks

SEQUENCE, BATCH, WIDTH, FFN, HEADS = 16, 2, 32, 64, 4
STEPS, COUNT = 2, 2

mesh = cache(partial(make_mesh, dp_shard=2, tp=2, device_type="cpu"))


def net(parallel: ParallelMesh | None, fuse: Any = False) -> nn.Sequential:
    options: dict[str, Any] = {}
    if parallel is not None:
        options = {"tp_group": parallel.tp_group, "sequence_parallel": True, "set_parallel_mode": True}
    with seeded(0):
        layers = [
            TransformerLayer(
                WIDTH,
                FFN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                qk_norm_type="RMSNorm",
                fuse_wgrad_accumulation=fuse,
                **options,
            )
            for _ in range(2)
        ]
    return nn.Sequential(*layers)


def build(
    parallel: ParallelMesh, *, fp8_weights: Any = "in_layers", fuse: Any = False, **options: Any
) -> Any:
    return shard(
        net(parallel, fuse),
        by_class(TransformerLayer),
        precision=Precision(fp8_weights=fp8_weights),
        mesh=parallel.dp,
        tp_group=parallel.tp_group,
        debug=Debug(poison_on_free=True),
        **options,
    )


def batch(replica: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + step)
    return [torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator) for _ in range(COUNT)]


def loss_of(model: nn.Module, x: Tensor, recipe: Any) -> Tensor:
    with autocast(enabled=recipe is not None, recipe=recipe):
        return (model(x) - 1).square().sum() / (SEQUENCE * BATCH * WIDTH)


def train(model: Any, parallel: ParallelMesh, recipe: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, gradients of all steps and parameters; also the first step's gradients, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    ranks, trace, first = Ranks.of(parallel.tp_group), [], {}
    for step in range(STEPS):
        for x in microbatches(model, batch(parallel.dp_rank, step)):
            loss = loss_of(model, part_of(x, 0, (SEQUENCE,), ranks), recipe)
            loss.backward()
            trace.append(loss.detach())
        trace += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        first = first or whole_grads(model)
        update(optimizer)
    return trace + [p.detach().clone() for p in model.parameters()], first


def assert_same(a: list[Tensor], b: list[Tensor], what: str) -> None:
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), what


def one_process(parallel: ParallelMesh, recipe: Any) -> dict[str, Tensor]:
    """Gradients of the first step, over all replicas."""
    model = net(None)
    for replica in range(parallel.dp_size):
        for x in batch(replica, 0):
            (loss_of(model, x, recipe) / parallel.dp_size).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("recipe", "bound"),
    # One process sees all samples one after the other, and its scales move on in between.
    [(None, 1e-5), (CurrentScaling(), 5e-3), (DelayedScaling(amax_history_len=4), None)],
    ids=["fp32", "current", "delayed"],
)
@on_ranks(4)
def test_flag_fusion_and_stored_weights_give_the_same_bits(recipe: Any, bound: float | None) -> None:
    parallel = mesh()
    runs = {
        "off": {"optimize_backward_concat": False},
        "on": {},
        "fused": {"fuse": True},
        "two passes": {"fuse": "two_pass"},
    }
    if isinstance(recipe, CurrentScaling):
        # As many bits as weights that each layer casts by itself, of which each rank has a part, too.
        runs["stored"] = {"fp8_weights": recipe, "fuse": True}
    found = {name: train(build(parallel, **options), parallel, recipe) for name, options in runs.items()}
    trace, grads = found["off"]
    for name, (other, _) in found.items():
        assert_same(trace, other, name)
    if bound is None:
        return
    expected = one_process(parallel, recipe)
    assert grads.keys() == expected.keys()
    assert_near(grads, expected, bound)
