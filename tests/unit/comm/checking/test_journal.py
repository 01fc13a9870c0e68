"""What the host makes of numbers that arrive in pinned memory; collectives and the device are stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from flatfsdp.comm.checking import journal
from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.reports import Launches

SIZE = 3
GATHER = Identity(Action.FORWARD, unit=1)


@pytest.fixture
def of_rank_0() -> Iterator[journal.DeviceJournal]:
    """The journal of rank 0 of three; what the others send stays in its rows until a test writes it."""
    zeros = torch.zeros

    def unpinned(*shape: int, pin_memory: bool, **options: Any) -> Tensor:
        return zeros(*shape, **options)

    ranks = mock.Mock(rank=0, size=SIZE, global_ranks=[0, 1, 2])
    with ExitStack() as stack:
        for name, stand_in in (
            ("on_gpu", lambda host, device: host),
            ("watch", lambda journal: None),
            ("all_gather_numbers", lambda *args: None),
            ("announce", lambda *args: None),
            ("abort", lambda *args: None),
            ("torch.zeros", unpinned),
        ):
            stack.enter_context(mock.patch(f"flatfsdp.comm.checking.journal.{name}", stand_in))
        yield journal.DeviceJournal(ranks, torch.device("cpu"), Launches(ranks))


def arrive(of: journal.DeviceJournal, launch: int, *numbers: int) -> None:
    of._numbers[launch, 1 : 1 + len(numbers)] = numbers


def under_way(of: journal.DeviceJournal) -> int:
    return len(cast(Any, of)._under_way)


def start(of: journal.DeviceJournal, identity: Identity) -> None:
    with of.launch(identity, of._ranks):
        pass


def test_launches_are_forgotten_in_their_order(of_rank_0: journal.DeviceJournal) -> None:
    start(of_rank_0, GATHER)
    start(of_rank_0, GATHER)
    arrive(of_rank_0, 1, GATHER.number, GATHER.number)
    arrive(of_rank_0, 0, GATHER.number)
    of_rank_0.look(wait=False)
    assert under_way(of_rank_0) == 2
    arrive(of_rank_0, 0, GATHER.number, GATHER.number)
    of_rank_0.look(wait=False)
    assert under_way(of_rank_0) == 0


def test_microbatches_may_differ(of_rank_0: journal.DeviceJournal) -> None:
    start(of_rank_0, GATHER)
    arrive(of_rank_0, 0, GATHER._replace(microbatch=3).number, GATHER.number)
    of_rank_0.look(wait=False)
    assert under_way(of_rank_0) == 0


@pytest.mark.parametrize("known", [1, 2])
def test_another_unit_raises(of_rank_0: journal.DeviceJournal, known: int) -> None:
    start(of_rank_0, GATHER)
    arrive(of_rank_0, 0, *[GATHER._replace(unit=2).number] * known)
    with pytest.raises(RuntimeError, match="ranks do not do the same: rank 0"):
        of_rank_0.look(wait=False)


def test_half_of_a_number_is_awaited(of_rank_0: journal.DeviceJournal) -> None:
    """Processes that share a GPU may take turns while a number is written."""
    start(of_rank_0, GATHER)
    arrive(of_rank_0, 0, GATHER.number >> 32 << 32, GATHER.number)
    rest = threading.Timer(0.05, arrive, (of_rank_0, 0, GATHER.number))
    rest.start()
    of_rank_0.look(wait=False)
    rest.join()
    assert under_way(of_rank_0) == 0


def test_bytes_of_a_payload_raise(of_rank_0: journal.DeviceJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SETTLING", 0.05)
    start(of_rank_0, GATHER)
    arrive(of_rank_0, 0, 12345)
    with pytest.raises(RuntimeError, match="rank 1 does something of another size"):
        of_rank_0.look(wait=False)


def test_a_row_is_used_again(of_rank_0: journal.DeviceJournal) -> None:
    for launch in range(journal.ROWS):
        start(of_rank_0, GATHER)
        arrive(of_rank_0, launch, GATHER.number, GATHER.number)
    of_rank_0.look(wait=False)
    start(of_rank_0, GATHER)
    of_rank_0.look(wait=False)
    assert under_way(of_rank_0) == 1


def test_a_rank_that_comes_too_late_hears_that_nobody_waits(of_rank_0: journal.DeviceJournal) -> None:
    with mock.patch("flatfsdp.comm.checking.journal.announce") as announce:
        of_rank_0.stop("rank 2 did not come within 60 s", GATHER.model)
    announce.assert_called_once_with(GATHER.model, "rank 2 did not come within 60 s")
