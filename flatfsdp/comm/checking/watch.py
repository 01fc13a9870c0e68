"""A thread that checks NCCL launches while the main thread waits for the device and cannot.

In:   the journals of this process (`journal.py`).
Out:  aborted communicators, so that the main thread goes on and raises.

Four situations need it.  (1) A rank sees a difference and raises, and another rank waits on its device for
collectives that the first one will never launch: that rank's journal knows why, but its host cannot look.
(2) In a grid of ranks, one row waits for another row that has stopped: it learns so from the store of the
process group.  (3) Collectives over two communicators block each other, so that no number arrives
(`reports.py`).  (4) A rank does not come at all.  The store is asked only when a launch does not end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Difference, ModelIdentity
from flatfsdp.comm.checking.reports import Launches, UnderWay
from flatfsdp.torch_private import default_store

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks."""

GRACE = 2.0
"""Seconds that the main thread has to see a difference by itself."""

PATIENCE = 5.0
"""Seconds that a launch may take before the store is asked what other ranks are doing."""


class Watched(Protocol):
    """Interface of a journal, as far as the thread needs it."""

    launches: Launches
    stopped: str | None

    def late(self, seconds: float) -> UnderWay | None:
        """The first launch that has not ended, if it is older than `seconds`."""

    def difference(self) -> tuple[Difference, ModelIdentity] | None:
        """Two ranks whose purposes differ, and the model; None if none are known."""

    def stop(self, why: Difference | str, model: ModelIdentity) -> None:
        """Aborts the model's communicators."""


_watched: WeakKeyDictionary[Watched, float | None] = WeakKeyDictionary()
"""Journals, each with the time since which a difference has been seen in it."""

_threads: list[threading.Thread] = []
"""The running thread, if any."""

_lock = threading.Lock()


def watch(journal: Watched) -> None:
    """Watches `journal` from now on, as long as it exists."""
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
    """Checks all journals; returns whether any are left.  If not, the next journal starts a new thread."""
    with _lock:
        journals = list(_watched.items())
        if not journals:
            # Under the lock, so that a journal that comes now either is in the list, or starts a thread.
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
    """Checks one journal; returns the time since which a difference has been seen, if any."""
    found = journal.difference()
    if found is not None:
        now = time.monotonic()
        # Not at once: a main thread that looks by itself raises without this one.
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
