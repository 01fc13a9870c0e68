"""A thread that looks at launches with NCCL while the main thread waits for the device and cannot.

In:   the journals of this process (`journal.py`).
Out:  communicators that are aborted, so that the main thread goes on and raises.

Four situations need it.  A rank that sees a difference raises, and another rank waits on its device for
collectives that the first one will not launch any more: that rank's own journal says why, but nobody looks.
In a grid of ranks, ranks of another row wait for a row that has stopped: they hear of it from the store of
the process group.  And collectives over two communicators can wait for each other, so that no number arrives
(`launches.py`).  And a rank may not come at all.  The store is asked only when a launch does not end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Difference, ModelIdentity
from flatfsdp.comm.checking.launches import Launches, UnderWay
from flatfsdp.torch_private import default_store

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks."""

GRACE = 2.0
"""Seconds in which the main thread may see a difference by itself."""

PATIENCE = 5.0
"""Seconds that a launch may take before the store is asked what other ranks do."""


class Watched(Protocol):
    """What the thread needs of a journal."""

    launches: Launches
    stopped: str | None

    def late(self, seconds: float) -> UnderWay | None:
        """The first launch that has not ended, if it has been under way for longer than that."""

    def difference(self) -> tuple[Difference, ModelIdentity] | None:
        """Two ranks that do not do the same, and of which model; None if none are known."""

    def stop(self, why: Difference | str, model: ModelIdentity) -> None:
        """Aborts the model's communicators."""


_watched: WeakKeyDictionary[Watched, float | None] = WeakKeyDictionary()
"""Journals, and since when a difference has been seen in each."""

_threads: list[threading.Thread] = []
"""The one that runs, if any."""

_lock = threading.Lock()


def watch(journal: Watched) -> None:
    """Looks at `journal` from now on, as long as it exists."""
    with _lock:
        _watched[journal] = None
        if not any(thread.is_alive() for thread in _threads):
            _threads[:] = [threading.Thread(target=_run, name="flatfsdp-watch", daemon=True)]
            _threads[0].start()


def announce(model: ModelIdentity, message: str) -> None:
    """Tells the other ranks of a model why this one stops."""
    if model.number and dist.is_initialized():
        default_store().set(_key(model), message)


def _announced(model: ModelIdentity) -> str | None:
    if not model.number or not dist.is_initialized() or not default_store().check([_key(model)]):
        return None
    return default_store().get(_key(model)).decode()


def _key(model: ModelIdentity) -> str:
    return f"flatfsdp/stopped/{model.number}"


def _run() -> None:
    while True:
        time.sleep(INTERVAL)
        if not _look_at_all():
            return


def _look_at_all() -> bool:
    """Whether there is still something to look at; the next journal starts another thread if not."""
    with _lock:
        journals = list(_watched.items())
        if not journals:
            _threads.clear()
    for journal, seen in journals:
        if journal.stopped is not None:
            continue
        try:
            _watched[journal] = _look(journal, seen)
        except Exception as error:
            # The store, or a process group, may be gone: the program is about to end.
            logger.debug("could not look at what is under way: %s", error)
    return bool(journals)


def _look(journal: Watched, seen: float | None) -> float | None:
    """Since when a difference has been seen."""
    found = journal.difference()
    if found is not None:
        now = time.monotonic()
        if seen is not None and now - seen > GRACE:
            journal.stop(*found)
            logger.error("%s", journal.stopped)
        return seen or now
    late = journal.late(PATIENCE)
    why = None if late is None else _why_late(late, journal.launches)
    if late is not None and why is not None:
        journal.stop(why, late.model)
        logger.error("%s", journal.stopped)
    return None


def _why_late(late: UnderWay, launches: Launches) -> Difference | str | None:
    announced = _announced(late.model)
    if announced is not None:
        return announced
    store = default_store()
    return launches.difference_to_next(store) or launches.missing_from(late, store)
