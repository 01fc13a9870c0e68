"""What a unit is called with belongs to the caller: a forward may replace it, and its memory is free then."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from flatfsdp import shard
from tests.support.ranks import on_ranks


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_freed = False

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        old = weakref.ref(cache["k"])
        cache["k"] = torch.cat([cache["k"], x])
        self.is_freed = old() is None
        y: Tensor = self.linear(cache["k"])
        return y


@on_ranks(1)
def test_a_cache_that_grows_is_not_kept_twice(rank: int) -> None:
    model, cache = shard(Cache()), {"k": torch.randn(2, 8)}
    with torch.no_grad():
        model(torch.randn(1, 8), cache)
    assert model.is_freed
