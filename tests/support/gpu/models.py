"""A GPT, its data and a training loop that the GPU tests share."""

from __future__ import annotations

from typing import Any

import torch

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from tests.support.meshes import placed
from tests.support.models import Trace, grads_of, update

BF16 = Precision(compute=torch.bfloat16)
WORLD_SIZES = [2, 4]
SMALL = GPTConfig(layers=4, hidden=256, heads=4, seq=128)
WIDE = GPTConfig(layers=6, hidden=2048, heads=16, seq=1024)


def build(config: GPTConfig = SMALL, **options: Any) -> FlatFSDP:
    options = {"optimize_backward_concat": False, **placed(options)}
    return auto_wrap(GPT(config), by_class(Block), device="cuda", **options)


def tokens(config: GPTConfig, rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (2, config.seq)
    return [torch.randint(0, config.vocab, shape, generator=generator).cuda() for _ in range(count)]


def backward(model: FlatFSDP, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Forwards and backwards of the microbatches of a step; returns their losses."""
    losses = []
    for batch in microbatches(model, batches):
        loss = model(batch, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: FlatFSDP, batches: list[torch.Tensor], steps: int = 4) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses, grads = [], []
    for _ in range(steps):
        losses += backward(model, batches)
        grads += grads_of(model)
        update(optimizer)
    assert all(torch.isfinite(loss) for loss in losses)
    state = [v.cpu() for p in model.parameters() for v in optimizer.state[p].values()]
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], state)
