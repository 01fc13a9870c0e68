"""A small language model and training loops that the distributed tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FlatFSDP, auto_wrap, by_class, microbatches, shard
from flatfsdp.comm.ranks import Ranks
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import ParamSlot
from tests.support.meshes import placed

VOCAB, WIDTH = 30, 20  # sizes that no alignment divides
FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
RESHARD = pytest.mark.parametrize("reshard", [True, False], ids=["zero3", "zero2"])


def each_policy(test: Callable[..., None]) -> Callable[..., None]:
    """Both flags with ZeRO-3 and ZeRO-2, in the fixture `policy`: options of a model that poisons."""
    return FLAGS(RESHARD(test))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; returns the loss of predicting the input."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), tokens.flatten())


class Skipping(Net):
    """Leaves out the block of number `skips`, which ranks may have set differently."""

    skips = -1

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skips else block(x)
        return self.head(x)


class RecomputedNet(Net):
    """A checkpoint around each block, or inside of it."""

    def __init__(self, reentrant: bool = False, around: bool = True) -> None:
        super().__init__()
        self.reentrant, self.around = reentrant, around
        for block in self.blocks if not around else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.around else block(x)
        return self.head(x)


def plain_net(net: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    """The model whose values `build` shards."""
    torch.manual_seed(seed)
    return net()


def build(seed: int = 0, **options: Any) -> Any:
    return shard(plain_net(seed=seed), by_class(Block), **placed(options))


def wrapped(seed: int = 0, **options: Any) -> FlatFSDP:
    options = {"optimize_backward_concat": False, **placed(options)}
    return auto_wrap(plain_net(seed=seed), by_class(Block), **options)


def flat(seed: int = 0, **options: Any) -> FullyShardedDataParallel:
    """The same with flat parameters, as fairscale's class has them."""
    net = plain_net(seed=seed)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(net, **options)


def data(rank: int, steps: int, count: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield [torch.randint(0, VOCAB, (2, 7), generator=generator) for _ in range(count)]


class Trace(NamedTuple):
    """What a training run produced on one rank; compare with `same`."""

    losses: list[Tensor]
    grads: list[Tensor]
    parameters: list[Tensor]
    optimizer: list[Tensor]


def backward(model: Any, batches: Iterable[Any]) -> list[Tensor]:
    """Forwards and backwards of the microbatches of a step; returns their losses."""
    losses = []
    for tokens in microbatches(model, batches):
        loss = model(tokens)
        loss.backward()
        losses.append(loss.detach())
    return losses


def update(*optimizers: Any) -> None:
    """A step of each, after which its gradients go."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: Any, rank: int, steps: int = 3, count: int = 3) -> Trace:
    """AdamW over the flat shards; records reduced gradients before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    for batches in data(rank, steps, count):
        losses += backward(model, batches)
        grads += grads_of(model)
        model.clip_grad_norm_(1.0)
        update(optimizer)
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], state)


def train_for_losses(model: Any, rank: int) -> list[Tensor]:
    """Trains two steps of three microbatches with AdamW, on a plain model or a sharded one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batches in data(rank, 2, 3):
        losses += backward(model, batches)
        update(optimizer)
    return losses


@functools.cache
def train_unsharded(world_size: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same training in one process, on every rank's data: rank 0's losses and the final state dict.

    Gradients are summed over microbatches and averaged over ranks; all in FP32.
    """
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for per_rank in zip(*(data(rank, 3, 3) for rank in range(world_size)), strict=True):
        for rank, batches in enumerate(per_rank):
            for tokens in batches:
                loss = model(tokens)
                (loss / world_size).backward()
                if rank == 0:
                    losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer)
    return losses, model.state_dict()


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, PyTorch computes with kernels that give the same bits each time, or raises.

    `warn_only` would not do: PyTorch's memory-efficient attention, which FP32 gets on a GPU, then still adds
    up the query's gradient in whatever order its blocks end, and beside NCCL's kernels that order changes.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def grads_of(model: Any) -> list[Tensor]:
    return [p.grad.as_subclass(Tensor).clone() for p in model.parameters() if p.grad is not None]


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the reduced gradients by name, joined over all ranks; checked to be equal where they should
    be.  Collective."""
    found = {}
    for prefix, group in named_groups(model):
        # Without gradients, nobody has used the unit.
        if not group.trains or not group.master.grads:
            continue
        full = group.master.gather(torch.cat(list(group.master.grads)).to(group.master.device))
        assert full is not None
        for slot, grad in zip(group.layout.slots, group.layout.views(full), strict=True):
            found[prefix + slot.name] = _joined(grad, slot, group.grid.tensor)
    return found


def _joined(grad: Tensor, slot: ParamSlot, ranks: Ranks) -> Tensor:
    """From the parts of tensor-parallel ranks, or what all of them have."""
    parts = [grad]
    if ranks.size > 1:
        parts = [torch.empty_like(grad) for _ in range(ranks.size)]
        dist.all_gather(parts, grad.contiguous(), group=ranks.group)
    if slot.partition is not None:
        return slot.partition.join(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), slot.name
    return parts[0]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and not differing(a, b)


def differing(a: list[Tensor], b: list[Tensor]) -> dict[int, str]:
    """How many elements differ, by the index of the tensors."""
    pairs = enumerate(zip(a, b, strict=True))
    return {n: f"{int((x != y).sum())} of {x.numel()}" for n, (x, y) in pairs if not torch.equal(x, y)}


def same_trace(a: Trace, b: Trace) -> dict[str, bool]:
    return {field: same(getattr(a, field), getattr(b, field)) for field in Trace._fields}
