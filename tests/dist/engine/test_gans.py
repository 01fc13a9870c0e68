"""GANs: two models, or two parts of one; each is frozen while the other one learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import by_class, shard
from tests.support.against_plain import assert_equal, average
from tests.support.models import Block, each_policy, plain_net, same
from tests.support.ranks import on_ranks

WIDTH = 20


def nothing(_: nn.Module) -> None:
    """FlatFSDP has reduced already."""


class Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(), Block(), nn.Linear(WIDTH, WIDTH))


class Pair(nn.Module):
    """Both in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Part(), Part()

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            return -self.critic(fake).mean()
        return self.critic(fake.detach()).square().mean() + (self.critic(real) - 1).square().mean()


def adversarial(
    pair: nn.Module, generator: nn.Module, critic: nn.Module, rank: int, reduce: Callable[[nn.Module], None]
) -> list[Tensor]:
    """Alternating steps; each one's optimizer has its own part.  Momentum would show a zero gradient."""
    make = torch.Generator().manual_seed(rank)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (critic, generator)]
    losses = []
    for _ in range(3):
        noise, real = (torch.randn(4, WIDTH, generator=make) for _ in range(2))
        for trains_critic in (True, False):
            critic.requires_grad_(trains_critic)
            generator.requires_grad_(not trains_critic)
            frozen = generator if trains_critic else critic
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = pair(noise, real if trains_critic else None)
            loss.backward()
            losses.append(loss.detach())
            assert all(p.grad is None for p in frozen.parameters())
            reduce(pair)
            for optimizer in optimizers:
                optimizer.step()
    return losses


@each_policy
@pytest.mark.parametrize("one_root", [False, True], ids=["two_models", "one_model"])
@on_ranks(1, 2)
def test_a_critic_is_frozen_in_the_steps_of_its_generator(rank: int, one_root: bool, policy: Any) -> None:
    plain, pair = plain_net(Pair), plain_net(Pair)
    if one_root:
        pair = shard(pair, by_class(Block, Part), **policy)
    else:
        pair.generator = shard(pair.generator, by_class(Block), **policy)
        pair.critic = shard(pair.critic, by_class(Block), **policy)
    ours = adversarial(pair, pair.generator, pair.critic, rank, nothing)
    theirs = adversarial(plain, plain.generator, plain.critic, rank, average)
    assert same(ours, theirs)
    assert_equal(dict(pair.state_dict()), dict(plain.state_dict()))
