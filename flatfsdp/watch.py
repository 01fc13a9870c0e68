"""A thread that looks at launches with NCCL while the main thread waits for the device and cannot.

In:   the journals of this process (`journal.py`).
Out:  communicators that are aborted, so that the main thread goes on and raises.

Two situations need it.  A rank that sees a difference raises, and another rank waits on its device for
collectives that the first one will not launch any more: that rank's own journal says why, but nobody looks.
And in a grid of ranks, ranks of another row wait for a row that has stopped: they hear of it from the store
of the process group, which they ask only when a launch does not end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from flatfsdp.identity import ModelIdentity

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks."""

GRACE = 2.0
"""Seconds in which the main thread may see a difference by itself."""

PATIENCE = 5.0
"""Seconds that a launch may take before the store is asked whether another rank has stopped."""


class Watched(Protocol):
    """What the thread needs of a journal."""

    stopped: str | None

    @property
    def oldest(self) -> Any: ...

    def difference(self) -> tuple[Any, Any] | None: ...

    def stop(self, why: Any, model: Any) -> None: ...


_watched: WeakKeyDictionary[Watched, float | None] = WeakKeyDictionary()
"""Journals, and since when a difference has been seen in each."""

_lock = threading.Lock()


def watch(journal: Watched) -> None:
    """Looks at `journal` from now on, as long as it exists."""
    with _lock:
        if not _watched:
            threading.Thread(target=_run, name="flatfsdp-watch", daemon=True).start()
        _watched[journal] = None


def announce(model: ModelIdentity, message: str) -> None:
    """Tells the other ranks of a model why this one stops."""
    if dist.is_initialized():
        _store().set(_key(model), message)


def _announced(model: ModelIdentity) -> str | None:
    if not dist.is_initialized() or not _store().check([_key(model)]):
        return None
    return _store().get(_key(model)).decode()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(model: ModelIdentity) -> str:
    return f"flatfsdp/stopped/{model.number}"


def _run() -> None:
    while True:
        time.sleep(INTERVAL)
        with _lock:
            journals = list(_watched.items())
            if not journals:
                # The next journal starts another thread.
                return
        _look_at(journals)
        del journals


def _look_at(journals: list[tuple[Watched, float | None]]) -> None:
    for journal, seen in journals:
        if journal.stopped is None:
            _watched[journal] = _look(journal, seen)


def _look(journal: Watched, seen: float | None) -> float | None:
    """Since when a difference has been seen."""
    now = time.monotonic()
    found = journal.difference()
    if found is not None:
        if seen is not None and now - seen > GRACE:
            journal.stop(*found)
            logger.error("%s", journal.stopped)
        return seen or now
    oldest = journal.oldest
    is_late = oldest is not None and now - oldest.since > PATIENCE
    if is_late and (message := _announced(oldest.model)) is not None:
        journal.stop(message, oldest.model)
        logger.error("%s", journal.stopped)
    return None
