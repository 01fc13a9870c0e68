"""A small FP8 model over ranks, its data and its training, and a count of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import by_class, microbatches, shard
from flatfsdp.fp8 import autocast
from tests.support.fp8_layers import SHORT, TOKENS, WIDTH, Block, Stack, seeded
from tests.support.meshes import placed


@contextmanager
def counted_reductions() -> Iterator[list[tuple[torch.Size, Any]]]:
    """Shape and operation of every all-reduce inside."""
    calls: list[tuple[torch.Size, Any]] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        calls.append((tensor.shape, op))
        return all_reduce(tensor, op, **options)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def batch(rank: int, step: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return scale * torch.randn(TOKENS, WIDTH, generator=generator)


def same_on_all_ranks(tensors: list[Tensor]) -> bool:
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        if not all(torch.equal(other.nan_to_num(7.0), tensor.nan_to_num(7.0)) for other in others):
            return False
    return True


def build(flag: bool = True, seed: int = 0, **options: Any) -> Any:
    return shard(seeded(Stack, seed), by_class(Block), optimize_backward_concat=flag, **placed(options))


def train(
    model: nn.Module, rank: int, steps: int = 2, recipe: Any = SHORT, start: int = 0, count: int = 2
) -> list[Tensor]:
    """Losses of this rank; SGD with momentum, so that what is in the optimizer counts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    losses = []
    for step in range(start, start + steps):
        for index, x in enumerate(microbatches(model, [batch(rank, 7 * step + m) for m in range(count)])):
            with autocast(recipe=recipe):
                loss = model(x * 2.0**step, index == 0).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses
