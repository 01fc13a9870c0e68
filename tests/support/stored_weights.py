"""A model whose weights are stored in FP8 in the flat buffer, its data and its training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, microbatches, shard
from flatfsdp.fp8 import CurrentScaling, autocast
from tests.support.fp8_layers import TOKENS, WIDTH, Block, Stack, seeded
from tests.support.meshes import placed

RECIPE = CurrentScaling()


class Net(Stack):
    """FP8 layers, and a head whose 40 rows FP8 GEMMs cannot have."""

    def __init__(self, fuse: Any = False, **options: Any) -> None:
        super().__init__(**options)
        self.last = nn.Linear(WIDTH, 40)
        for module in self.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = fuse

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self.last(super().forward(x, is_first_microbatch))


def build(in_fp8: bool, compute: torch.dtype = torch.float32, fuse: Any = False, **options: Any) -> Any:
    wrap = options.pop("wrap", shard)
    precision = Precision(compute=compute, fp8_weights=RECIPE if in_fp8 else "in_layers")
    options |= {"precision": precision, "debug": Debug(poison_on_free=True)}
    return wrap(seeded(partial(Net, fuse)), by_class(Block), **placed(options))


def batches(rank: int, steps: int, count: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    for step in range(steps):
        yield [2.0**step * torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(count)]


def train(model: Any, rank: int, steps: int = 3, count: int = 2, recipe: Any = RECIPE) -> list[Tensor]:
    """Losses; AdamW at a rate that moves every scale."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    losses = []
    for batch in batches(rank, steps, count):
        for x in microbatches(model, batch):
            with autocast(recipe=recipe):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses
