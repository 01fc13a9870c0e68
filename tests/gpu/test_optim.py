"""`flatfsdp.optim` with its kernels: the engine notices their steps, and a CPU takes the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import Precision
from flatfsdp.optim import SGD, AdamW
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.gpu.models import BF16, SMALL, backward, build, tokens
from tests.support.models import repeatable, same, update
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU


@repeatable()
def trained(
    rank: int, make: Any, *, is_told: bool = True, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final shards; without `is_told`, the optimizer does not know that they are shards."""
    torch.manual_seed(0)
    model, batches = build(**options), tokens(SMALL, rank, 2)
    for parameter in model.parameters() if not is_told else ():
        del parameter.flat_shard
    optimizer, losses = make(model.parameters()), []
    for _ in range(5):
        losses += backward(model, batches)
        update(optimizer)
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@on_ranks(2, backend="nccl")
def test_it_trains_as_pytorchs_adamw_does(rank: int, precision: Precision) -> None:
    ours, theirs = (
        trained(rank, lambda p, kind=kind: kind(p, lr=1e-3), precision=precision)[0]
        for kind in (AdamW, torch.optim.AdamW)
    )
    assert ours[-1] < ours[0]
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-3, atol=0)


@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@on_ranks(2, backend="nccl")
def test_the_optimizer_writes_the_copy_that_the_engine_would(rank: int, reshard: bool) -> None:
    results = [
        trained(rank, AdamW, is_told=is_told, precision=BF16, reshard_after_forward=reshard)
        for is_told in (True, False)
    ]
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(AdamW, {"lr": 1e-3, "weight_decay": 0.1}), (SGD, {"lr": 0.125, "momentum": 0.9})],
    ids=["AdamW", "SGD"],
)
@on_ranks(2, backend="nccl")
def test_a_step_on_the_host_has_the_same_bits(rank: int, kind: Any, options: dict[str, Any]) -> None:
    """The norm limit is never reached: the norm's last bits depend on the device."""
    results = [
        trained(
            rank, lambda p: kind(p, max_grad_norm=1e6, **options), precision=BF16, cpu_offload=cpu_offload
        )
        for cpu_offload in (False, True)
    ]
    assert all(same(a, b) for a, b in zip(*results, strict=True))
