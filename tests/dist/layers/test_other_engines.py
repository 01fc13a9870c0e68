"""Our layers under PyTorch's own data-parallel wrappers: the gradients of one model without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import TransformerLayer
from tests.support.ranks import on_ranks

RECIPES: dict[str, Any] = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
}


def block() -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)


def gradients(model: nn.Module, recipe: Any, rank: int, is_first: bool | None) -> None:
    """Runs two microbatches; the second one is the same on all ranks."""
    for seed, first in ((1 + rank, is_first), (9, None if is_first is None else False)):
        torch.manual_seed(seed)
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = model(torch.randn(16, 2, 32), is_first_microbatch=first)
        out.square().sum().backward()


def expected(recipe: Any, rank: int, is_first: bool | None) -> list[Tensor]:
    model = block()
    gradients(model, recipe, rank, is_first)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_the_same_gradients(rank: int, name: str) -> None:
    recipe = RECIPES[name]
    for is_first in (None, True):
        wanted = expected(recipe, rank, is_first)
        replicated = DistributedDataParallel(block())
        sharded = fully_shard(block())
        for model in (replicated, sharded):
            gradients(model, recipe, rank, is_first)
        for ours, theirs, want in zip(replicated.parameters(), sharded.parameters(), wanted, strict=True):
            torch.testing.assert_close(ours.grad, want, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(theirs.grad.full_tensor(), want, rtol=1e-5, atol=1e-6)
