"""Launches that wait for each other: two late ranks read what the other one has under way."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.reports import Launches, UnderWay

GATHER, NORM, REDUCE = (Identity(action).number for action in (Action.BACKWARD, Action.NORM, Action.REDUCE))


def launches(rank: int, *numbers: int) -> Launches:
    """Launches of one of three ranks; the first launch has ended."""
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


def overdue(launch: int, limit: float = 2.0) -> UnderWay:
    """A launch that has been under way for 10 s."""
    return UnderWay(0, launch, b"", ModelIdentity(timeout=limit), time.monotonic() - 10.0, limit)


def test_ranks_that_do_not_come_are_named() -> None:
    """The third one has written what was under way in an earlier step."""
    store = dist.HashStore()
    first, second = launches(0, GATHER, GATHER, NORM), launches(1, GATHER, GATHER, NORM)
    launches(2, GATHER, GATHER).difference_to_next(store)
    for each in (first, second):
        each.end(1)
        assert each.difference_to_next(store) is None
        for limit in (20.0, 9.0):
            late = overdue(2, limit)
            assert each.missing_from(late, store) is None, "there is time left, or to write that one has come"
    for each in (first, second):
        words = each.missing_from(overdue(2), store)
        assert words is not None
        assert words.startswith("rank 6 did not come within 2 s: rank 4 takes the norm of the gradients")


def test_nobody_is_missing_where_all_have_come() -> None:
    store = dist.HashStore()
    everyone = [launches(rank, GATHER, NORM) for rank in range(3)]
    for each in everyone:
        each.difference_to_next(store)
    assert everyone[0].missing_from(overdue(1), store) is None
