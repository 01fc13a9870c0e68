"""Ranks that wait in vain find out who is missing, and what the others are in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flatfsdp.comm.checking import reports
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.reports import why_in_vain
from flatfsdp.comm.ranks import Ranks

MODEL = ModelIdentity(7, ["embedding", "blocks.0"], timeout=2.0)
GATHER = Identity(Action.FORWARD, MODEL, unit=1, step=3)
BACKEND = RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer")


class Three(Ranks):
    """One of three ranks, without a process group."""

    name = "data parallel"  # type: ignore[assignment]
    global_ranks = [4, 5, 6]  # type: ignore[assignment]  # noqa: RUF012


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(reports, "default_store", lambda: store)
    monkeypatch.setattr(reports, "SETTLING", 0.3)
    return store


def said(*waited: tuple[int, Identity, float]) -> list[str]:
    """What ranks say that have waited together.

    Args:
        waited: the rank, what it waited in, and for how many seconds.
    """

    def of(rank: int, identity: Identity, seconds: float) -> str:
        return why_in_vain(Three(None, 3, rank), 8, identity, MODEL, seconds, MODEL.timeout, BACKEND)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda each: of(*each), waited))


def test_a_rank_that_does_not_come_is_named_with_what_the_others_are_in() -> None:
    norm = Identity(Action.NORM, MODEL, step=3)
    for words in said((0, GATHER, 2.0), (2, norm, 1.5)):
        assert words.startswith("rank 5 did not come within 2 s: rank 4 gathers unit blocks.0 for a forward")
        assert "rank 6 takes the norm of the gradients" in words and "timeout=" in words


def test_ranks_that_do_the_same_are_named_together() -> None:
    (words,) = set(said((1, GATHER, 2.0), (2, GATHER, 2.0)))
    assert "rank 5 gathers unit blocks.0 for a forward (step 3, microbatch 0), as does rank 6." in words


def test_a_connection_that_closes_at_once_is_a_rank_that_has_ended() -> None:
    for words in said((0, GATHER, 0.1), (1, GATHER, 0.1)):
        assert words.startswith("rank 6 has ended, or left a collective: rank 4 gathers")


def test_a_rank_that_comes_too_late_is_told_who_had_given_up() -> None:
    first, second, late = said((0, GATHER, 2.0), (1, GATHER, 2.0), (2, GATHER, 0.0))
    for words in (first, second):
        assert words.startswith("rank 6 did not come within 2 s: rank 4 gathers")
    assert late.startswith("ranks 4, 5 had given up waiting: rank 6 gathers unit blocks.0")


def test_what_the_backend_says_is_all_where_everyone_came_in_time() -> None:
    for words in said(*((rank, GATHER, 0.1) for rank in range(3))):
        assert words.startswith("this rank gathers unit blocks.0") and str(BACKEND) in words


def test_a_store_that_does_not_answer_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()

    class Stopped(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            ends.wait()
            return False

    monkeypatch.setattr(reports, "default_store", Stopped)
    (words,) = said((0, GATHER, 2.0))
    ends.set()
    assert str(BACKEND) in words and "rank 0, which has ended or was stopped" in words


def test_a_store_that_is_gone_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> dist.Store:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(reports, "default_store", gone)
    (words,) = said((1, GATHER, 2.0))
    assert words.startswith("this rank gathers unit blocks.0") and str(BACKEND) in words
