"""The thread that looks at launches while the main thread waits: when it acts, and when it leaves alone."""

from __future__ import annotations

import time

import pytest

from flatfsdp.comm.checking import watch
from flatfsdp.comm.checking.identity import Difference, ModelIdentity
from flatfsdp.comm.checking.reports import Launches, UnderWay
from flatfsdp.comm.ranks import ALONE

MODEL = ModelIdentity(7)
DIFFERENCE = Difference(0, 1, 1, 2)


class Journal:
    """What the thread sees of one, and what it has done."""

    def __init__(self, difference: Difference | None = None, age: float | None = None) -> None:
        self.launches = Launches(ALONE)
        self.stopped: str | None = None
        self._difference = difference
        self._since = None if age is None else time.monotonic() - age

    def late(self, seconds: float) -> UnderWay | None:
        if self._since is None or time.monotonic() - self._since <= seconds:
            return None
        return UnderWay(0, 0, b"", MODEL, self._since)

    def difference(self) -> tuple[Difference, ModelIdentity] | None:
        return None if self._difference is None else (self._difference, MODEL)

    def stop(self, why: Difference | str, model: ModelIdentity) -> None:
        assert model is MODEL
        self.stopped = str(why)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ModelIdentity]:
    """The models that were asked for, of which another rank has stopped."""
    found: list[ModelIdentity] = []

    def announced(model: ModelIdentity) -> str:
        found.append(model)
        return "rank 0 has stopped"

    monkeypatch.setattr(watch, "_announced", announced)
    return found


def test_the_main_thread_gets_time_to_see_a_difference() -> None:
    journal = Journal(DIFFERENCE)
    seen = watch._look(journal, None)
    assert seen is not None and journal.stopped is None
    assert watch._look(journal, seen) == seen and journal.stopped is None
    watch._look(journal, seen - watch.GRACE)
    assert journal.stopped == str(DIFFERENCE)


def test_a_launch_that_does_not_end_asks_for_the_others(asked: list[ModelIdentity]) -> None:
    journal = Journal(age=watch.PATIENCE + 1)
    watch._look(journal, None)
    assert asked == [MODEL] and journal.stopped == "rank 0 has stopped"


@pytest.mark.parametrize("age", [None, 0.0])
def test_nobody_is_asked_while_launches_end(age: float | None, asked: list[ModelIdentity]) -> None:
    journal = Journal(age=age)
    assert watch._look(journal, None) is None
    assert asked == [] and journal.stopped is None


def test_one_thread_looks_at_all_journals_and_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL", 0.01)
    journals = [Journal(), Journal()]
    for journal in journals:
        watch.watch(journal)
    (thread,) = watch._threads
    assert thread.is_alive()
    del journal, journals
    thread.join(5)
    assert not thread.is_alive() and watch._threads == []
    another = Journal()
    watch.watch(another)
    assert watch._threads[0].is_alive()


def test_a_journal_that_fails_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Journal):
        def late(self, seconds: float) -> UnderWay | None:
            raise RuntimeError("the process group is gone")

    broken, other = Broken(), Journal(DIFFERENCE)
    monkeypatch.setattr(watch, "_watched", {broken: None, other: time.monotonic() - 2 * watch.GRACE})
    assert watch._look_at_all()
    assert other.stopped == str(DIFFERENCE)
