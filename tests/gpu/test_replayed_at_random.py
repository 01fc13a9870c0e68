"""Random models and steps, replayed: the bits of eager microbatches."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu.marks import FP8_GEMMS
from tests.support.ranks import on_ranks
from tests.support.replaying.search import replays_of

pytestmark = FP8_GEMMS


@pytest.mark.parametrize("first", range(0, 200, 10))
@on_ranks(2, backend="nccl", timeout=240.0)
def test_at_random(rank: int, first: int) -> None:
    device = f"cuda:{torch.cuda.current_device()}"
    assert sum(replays_of(rank, seed, device) for seed in range(first, first + 10)) > 50
