"""The thread that looks at launches while the main thread waits: when it acts, and when it leaves alone."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest

from flatfsdp import watch
from flatfsdp.identity import ModelIdentity

MODEL = ModelIdentity(7)


class Launch(NamedTuple):
    model: ModelIdentity
    since: float


class Journal:
    """What the thread sees of one, and what it has done."""

    def __init__(self, difference: str | None = None, age: float | None = None) -> None:
        self.stopped: str | None = None
        self._difference = difference
        self.oldest = None if age is None else Launch(MODEL, time.monotonic() - age)

    def difference(self) -> tuple[Any, Any] | None:
        return None if self._difference is None else (self._difference, MODEL)

    def stop(self, why: Any, model: Any) -> None:
        assert model is MODEL
        self.stopped = why


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[ModelIdentity]:
    """Another rank has stopped; the models that were asked for."""
    asked = []

    def message_of(model: ModelIdentity) -> str:
        asked.append(model)
        return "rank 0 has stopped"

    monkeypatch.setattr(watch, "_announced", message_of)
    return asked


def test_the_main_thread_gets_time_to_see_a_difference() -> None:
    journal = Journal("ranks differ")
    seen = watch._look(journal, None)
    assert seen is not None and journal.stopped is None
    assert watch._look(journal, seen) == seen and journal.stopped is None
    watch._look(journal, seen - watch.GRACE)
    assert journal.stopped == "ranks differ"


def test_a_launch_that_does_not_end_asks_for_the_others(announced: list[ModelIdentity]) -> None:
    journal = Journal(age=watch.PATIENCE + 1)
    watch._look(journal, None)
    assert announced == [MODEL] and journal.stopped == "rank 0 has stopped"


@pytest.mark.parametrize("age", [None, 0.0])
def test_nobody_is_asked_while_launches_end(age: float | None, announced: list[ModelIdentity]) -> None:
    journal = Journal(age=age)
    assert watch._look(journal, None) is None
    assert announced == [] and journal.stopped is None
