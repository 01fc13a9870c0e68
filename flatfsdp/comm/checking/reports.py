"""Reports of launches in the store of the process group, from which ranks learn what the others are in.

In:   launches in which a rank waits (`identity.py`), from the journals (`journal.py`).
Out:  a message that names ranks which did not come; two ranks whose launches differ.

    gloo   a backend only says that an address timed out, or closed its connection: each rank whose launch has
           failed reports it, and ranks that have reported nothing a moment later are missing
    NCCL   collectives over two communicators can block each other.  For example, one rank takes a norm, and
           behind it waits a gather that the others need before they reach the norm; or one rank leaves out a
           gather, behind which the others' reduction waits.  Each rank then reports its launches in flight,
           and reads those of the next rank
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Difference, Identity, ModelIdentity, described
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import default_store

SETTLING = 2.0
"""Seconds within which all ranks that waited in the same launch learn that it was in vain."""

_PAUSE = 0.01
_SHOWN = 4


def _report(store: dist.Store, about: str, ranks: Ranks, launches: Mapping[int, Any]) -> None:
    """Writes this rank's launches, by their number among all launches over these ranks."""
    store.set(_key(about, ranks, ranks.rank), json.dumps(launches))


def _reported(store: dist.Store, about: str, ranks: Ranks, rank: int) -> dict[str, Any]:
    """What a rank has written last."""
    key = _key(about, ranks, rank)
    # `get` alone would wait for a key that nobody sets.
    return json.loads(store.get(key)) if store.check([key]) else {}


def _key(about: str, ranks: Ranks, rank: int) -> str:
    return f"flatfsdp/{about}/{ranks.name}/{rank}"


# ---- gloo: launches that have failed ----------------------------------------------------------------------


def why_in_vain(
    ranks: Ranks,
    launch: int,
    identity: Identity,
    model: ModelIdentity,
    seconds: float,
    limit: float | None,
    error: Exception,
) -> str:
    """Message for a launch that failed on this rank because its backend could not reach another one.

    Args:
        ranks: ranks of the launch.
        launch: number of launches over these ranks before.
        identity: purpose of the launch.
        model: model whose unit names the message uses.
        seconds: time that this rank has waited.
        limit: longest time it would have waited, in seconds; None: as long as the process group allows.
        error: error of the backend.
    """
    gave_up = limit is not None and seconds >= limit
    lost = f"this rank {described(identity.number, model)}, and lost the other ranks: {error}"
    try:
        everyone = _tell_and_hear(default_store(), ranks, launch, (identity.number, gave_up))
    except RuntimeError:
        everyone = None
    if everyone is None:
        return f"{lost}  {_NO_STORE}"
    missing = [rank for index, rank in enumerate(ranks.global_ranks) if index not in everyone]
    here = {ranks.global_ranks[index]: each for index, each in everyone.items()}
    impatient = [rank for rank, (_, has_given_up) in here.items() if has_given_up]
    numbers = {rank: number for rank, (number, _) in here.items()}
    if missing:
        return words_for(missing, numbers, model, limit if impatient else None)
    # All ranks have come to this launch.  Those that waited longest gave up, and closed their connections,
    # which the late ones have found closed.
    late = {rank: numbers.pop(rank) for rank in list(here) if rank not in impatient}
    if late and gave_up:
        return words_for(list(late), numbers, model, limit)
    if late and impatient:
        too_late = f"{_in_words(late, model)} too late"
        return f"{named(impatient)} had given up waiting: {too_late}. {_WAYS_OUT}"
    return lost


def words_for(
    missing: Sequence[int], here: Mapping[int, int], model: ModelIdentity, limit: float | None
) -> str:
    """Names the missing ranks, and says what the others are in.

    Args:
        missing: ranks, by their number in the default process group.
        here: number of the launch that each of the others is in, by rank.
        model: model whose unit names the message uses.
        limit: seconds that they have waited; None: a connection was closed before.
    """
    what = _in_words(here, model)
    if limit is None:
        has = "have" if len(missing) > 1 else "has"
        return f"{named(missing)} {has} ended, or left a collective: {what}. Its own output says why."
    return f"{named(missing)} did not come within {limit:.0f} s: {what}. {_WAYS_OUT}"


def _in_words(here: Mapping[int, int], model: ModelIdentity) -> str:
    by_words: dict[str, list[int]] = {}
    for rank, number in sorted(here.items()):
        by_words.setdefault(described(number, model), []).append(rank)
    parts = []
    for words, (first, *others) in list(by_words.items())[:_SHOWN]:
        so_does = f", as {'do' if len(others) > 1 else 'does'} {named(others)}" if others else ""
        parts.append(f"rank {first} {words}{so_does}")
    return "; ".join(parts)


_WAYS_OUT = (
    "Either it did something else (skipped a microbatch, caught an exception, ended), or it was only slow "
    "(it saves, loads data or compiles): then pass a larger timeout= to FlatFSDP or shard, in seconds, "
    "or a larger timeout to init_process_group if that is what has passed. "
    "The process group cannot be used any more; start again from the last checkpoint."
)


_NO_STORE = (
    "Nor does the store of the process group answer, where ranks would be named: most often it is in the "
    "process of rank 0, which has ended or was stopped then."
)


def named(ranks: Sequence[int]) -> str:
    """Names ranks, such as "rank 1", or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _tell_and_hear(
    store: dist.Store, ranks: Ranks, launch: int, own: tuple[int, bool]
) -> dict[int, tuple[int, bool]] | None:
    """Exchanges reports with the ranks that waited in this launch, by their number among `ranks`.

    A report is the purpose of the launch, and whether its time limit had passed; if not, a connection was
    closed.  None if the store does not answer.
    """
    found = {ranks.rank: own}
    answers = threading.Event()

    def tell_and_hear() -> None:
        with suppress(RuntimeError):  # the store has gone with the rank that had it
            # Told before asking: another rank may be asking for the last time now.
            _report(store, "in vain", ranks, {launch: own})
            deadline = time.monotonic() + SETTLING
            while len(found) < ranks.size and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                for rank in set(range(ranks.size)) - found.keys():
                    theirs = _reported(store, "in vain", ranks, rank).get(str(launch))
                    if theirs is not None:
                        found[rank] = tuple(theirs)
            answers.set()

    # A store in a stopped process never answers.
    asking = threading.Thread(target=tell_and_hear, daemon=True)
    asking.start()
    asking.join(2 * SETTLING)
    # Without the event, the thread may still be writing to `found`.
    return found if answers.is_set() else None


# ---- NCCL: launches in flight -----------------------------------------------------------------------------

WRITTEN = 7.0
"""Seconds within which a waiting rank has said so: `watch.py` looks once a second at launches 5 s old."""


class UnderWay(NamedTuple):
    """A launch in flight, and the place where its numbers arrive.

    Attributes:
        number: index of the row in CPU memory.
        launch: index among all launches of these ranks.
        alike: the row's bytes once all ranks have sent the same number.
        since: time of the launch on the monotonic clock, in seconds.
        limit: seconds that it may take; None: as long as the process group allows.
    """

    number: int
    launch: int
    alike: bytes
    model: ModelIdentity
    since: float
    limit: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether its time limit has passed, and ranks that came in time have had time to say so."""
        return self.limit is not None and time.monotonic() - self.since > self.limit + WRITTEN


class Launches:
    """Purposes of launches, from the moment the host makes them until their numbers have arrived."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made = 0
        self._under_way: dict[int, int] = {}

    def begin(self, number: int) -> int:
        """Notes a launch; returns the number of launches before it.

        Args:
            number: its purpose.
        """
        launch, self._made = self._made, self._made + 1
        self._under_way[launch] = number
        return launch

    def end(self, launch: int) -> None:
        """Drops a launch that was equal on all ranks."""
        del self._under_way[launch]

    def difference_to_next(self, store: dist.Store) -> Difference | None:
        """Compares launches in flight with those that the next rank has written to the store.

        If any ranks differ, some neighbours do, so each rank needs to read from one other rank only.  None if
        no difference is known, as long as the next rank has written nothing, for example.  Callable from any
        thread.
        """
        # A copy, as the main thread goes on to launch.
        own = dict(self._under_way)
        rank, following = self._ranks.rank, (self._ranks.rank + 1) % self._ranks.size
        # For the rank before this one, and for `missing_from`, which takes a rank for absent that has not
        # written an overdue launch.
        _report(store, "under way", self._ranks, own)
        theirs = _reported(store, "under way", self._ranks, following)
        numbers = [0] * self._ranks.size
        for launch, number in sorted(own.items()):
            # A launch that the next rank has not made yet, or has ended, is unknown, and no difference.
            numbers[rank], numbers[following] = number, theirs.get(str(launch), 0)
            difference = Difference.among(numbers, self._ranks)
            if difference is not None:
                return difference
        return None

    def missing_from(self, late: UnderWay, store: dist.Store) -> str | None:
        """Message naming the ranks that have not come to an overdue launch; None if all have.

        Ranks that have come have said so, by `difference_to_next`.
        """
        if not late.is_overdue:
            return None
        here = {}
        for index, rank in enumerate(self._ranks.global_ranks):
            number = _reported(store, "under way", self._ranks, index).get(str(late.launch))
            if number is not None:
                here[rank] = number
        missing = [rank for rank in self._ranks.global_ranks if rank not in here]
        return words_for(missing, here, late.model, late.limit) if missing else None
