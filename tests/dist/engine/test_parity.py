"""Flag on == flag off, bit for bit, and both equal the unsharded model; for every strategy and precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Debug, Precision, Prefetch
from tests.support.against_plain import assert_equal
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import (
    FLAGS,
    Trace,
    backward,
    build,
    data,
    plain_net,
    same_trace,
    train,
    train_unsharded,
    whole_grads,
)
from tests.support.plain_layers import error
from tests.support.ranks import on_ranks

FP32, BF16 = Precision(), Precision(compute=torch.bfloat16)
STRATEGIES = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "replicated": REPLICATED,
    "zero3, every microbatch": {"grad_sync": "every"},
    "zero2, every microbatch": {"grad_sync": "every", "reshard_after_forward": False},
}
STRATEGIES |= {f"hybrid {name}": {**it, **HYBRID} for name, it in STRATEGIES.items() if "mesh" not in it}
# Each strategy in both precisions, and on two ranks as on four where that is possible.
RUNS = [
    (4 if "hybrid" in name or (number + in_bf16) % 2 else 2, name, BF16 if in_bf16 else FP32)
    for number, name in enumerate(STRATEGIES)
    for in_bf16 in (False, True)
]
ALL_TRUE = {"losses": True, "grads": True, "parameters": True, "optimizer": True}


@pytest.mark.parametrize(("world_size", "strategy", "precision"), RUNS)
@on_ranks()
def test_flag_on_equals_flag_off(rank: int, world_size: int, strategy: str, precision: Precision) -> None:
    options = {"precision": precision, **STRATEGIES[strategy]}
    models = [build(optimize_backward_concat=flag, **options) for flag in (False, True)]
    off, on = (train(model, rank) for model in models)
    assert same_trace(off, on) == ALL_TRUE
    if precision == FP32:
        assert_equals_the_unsharded_model(models[1], on, rank, world_size)


def assert_equals_the_unsharded_model(model: Any, trace: Trace, rank: int, world_size: int) -> None:
    losses, state = train_unsharded(world_size)
    if rank == 0:
        torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)
    ours = model.state_dict()
    assert list(ours) == list(state)
    torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-6)
    assert all(error(ours[name], expected) < 1e-6 for name, expected in state.items())


@FLAGS
@on_ranks(2)
def test_the_order_of_sums_is_written_down(rank: int, flag: bool) -> None:
    """Over microbatches, then ranks, or over ranks, then microbatches: one process has the same bits."""
    net = plain_net()
    names, parameters = zip(*net.named_parameters(), strict=True)
    grads = [
        [torch.autograd.grad(net(tokens), parameters) for batches in data(owner, 1, 3) for tokens in batches]
        for owner in range(2)
    ]
    for sync, order in (("last", grads), ("every", zip(*grads, strict=True))):
        total = reduce(added, (reduce(added, each) for each in order))
        model = build(grad_sync=sync, optimize_backward_concat=flag)
        ((*batches,),) = data(rank, 1, 3)
        backward(model, batches)
        assert_equal(whole_grads(model), dict(zip(names, (grad / 2 for grad in total), strict=True)))


def added(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_nothing_reads_a_freed_buffer(rank: int, depth: int, flag: bool) -> None:
    options = {"prefetch": Prefetch(depth, depth), "optimize_backward_concat": flag, "precision": BF16}
    plain, poisoned = (
        train(build(debug=Debug(poison_on_free=poison), **options), rank) for poison in (False, True)
    )
    assert same_trace(plain, poisoned) == ALL_TRUE


@on_ranks(2)
def test_reducing_in_bf16_keeps_parity_and_returns_master_precision(rank: int) -> None:
    precision = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    off, on = (train(build(optimize_backward_concat=f, precision=precision), rank) for f in (False, True))
    assert same_trace(off, on) == ALL_TRUE
    assert on.grads[0].dtype == torch.float32


def test_world_of_one_without_torch_distributed() -> None:
    for precision in (FP32, BF16):
        off, on = (train(build(optimize_backward_concat=f, precision=precision), 0) for f in (False, True))
        assert same_trace(off, on) == ALL_TRUE
    losses, _ = train_unsharded(1)
    trace = train(build(), 0)
    torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)
