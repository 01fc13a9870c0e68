"""Launches that wait for each other: two late ranks read what the other one has under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.launches import Launches

GATHER, NORM, REDUCE = (Identity(action).number for action in (Action.BACKWARD, Action.NORM, Action.REDUCE))


def launches(rank: int, *numbers: int) -> Launches:
    """Of one of three ranks; the first launch has ended."""
    ranks: Any = SimpleNamespace(rank=rank, size=3, name="pg", global_ranks=[4, 5, 6])
    made = Launches(ranks)
    for number in numbers:
        made.begin(number)
    made.end(0)
    return made


def test_a_rank_finds_what_the_next_one_does_not_do() -> None:
    store = dist.HashStore()
    first = launches(0, GATHER, GATHER, REDUCE)
    second = launches(1, GATHER, GATHER, NORM, GATHER)
    third = launches(2, GATHER, GATHER, REDUCE, GATHER)
    assert third.difference_to_next(store) is None, "the next rank has not asked yet"
    assert second.difference_to_next(store) == (5, NORM, 6, REDUCE)
    assert first.difference_to_next(store) == (4, REDUCE, 5, NORM)
    assert third.difference_to_next(store) is None, "launches that both have are alike"


def test_what_has_ended_on_one_rank_is_not_compared() -> None:
    store = dist.HashStore()
    ahead, behind = launches(0, GATHER, GATHER, REDUCE), launches(1, GATHER, GATHER, REDUCE)
    ahead.end(1)
    for _ in range(2):
        assert ahead.difference_to_next(store) is None
        assert behind.difference_to_next(store) is None
