"""Launches under way over all communicators of the same ranks, in the order in which the host makes them.

In:   what each launch is for (`identity.py`), from the journals of these communicators (`journal.py`).
Out:  two ranks whose launches differ although no number arrives, and ranks that do not come, for `watch.py`.

Collectives over two communicators can wait for each other.  One rank takes a norm, say, and behind it waits a
gather that the others need before they come to the norm; or one leaves out a gather, behind which the others'
reduction waits.  Then each rank writes what it has under way into the store of the process group, and reads
what the next rank has.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import torch.distributed as dist

from flatfsdp.comm.checking.absence import words_for
from flatfsdp.comm.checking.identity import Difference, ModelIdentity
from flatfsdp.comm.ranks import Ranks

WRITTEN = 7.0
"""Seconds in which a rank that waits has written so: `watch.py` looks once a second at what is 5 s old."""


class UnderWay(NamedTuple):
    """A launch under way, and where its numbers arrive.

    Attributes:
        number: of the row of host memory.
        launch: its place among all launches of these ranks.
        alike: the row's bytes once all ranks have sent the same number.
        since: on the monotonic clock, in seconds.
        limit: seconds that it may take; None: as long as the process group has it.
    """

    number: int
    launch: int
    alike: bytes
    model: ModelIdentity
    since: float
    limit: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether its time limit has passed, and whoever came before that has written so."""
        return self.limit is not None and time.monotonic() - self.since > self.limit + WRITTEN


class Launches:
    """What launches are for, from when the host makes them to when their numbers are there."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made = 0
        self._under_way: dict[int, int] = {}

    def begin(self, number: int) -> int:
        """Returns how many launches there were before this one.

        Args:
            number: what it is for.
        """
        launch, self._made = self._made, self._made + 1
        self._under_way[launch] = number
        return launch

    def end(self, launch: int) -> None:
        """The launch was alike on all ranks."""
        del self._under_way[launch]

    def difference_to_next(self, store: dist.Store) -> Difference | None:
        """The first launch that is for something else on the next rank, if both ranks ask; for any thread.

        Where ranks differ, some neighbours do, so that each rank reads from one other rank only.
        """
        own = dict(self._under_way)
        rank, following = self._ranks.rank, (self._ranks.rank + 1) % self._ranks.size
        store.set(self._key(rank), json.dumps(own))
        theirs = self._under_way_on(following, store)
        numbers = [0] * self._ranks.size
        for launch, number in sorted(own.items()):
            numbers[rank], numbers[following] = number, theirs.get(str(launch), 0)
            difference = Difference.among(numbers, self._ranks)
            if difference is not None:
                return difference
        return None

    def missing_from(self, late: UnderWay, store: dist.Store) -> str | None:
        """Words for the ranks that have not come to a launch that is overdue; None if all have.

        Those that have come have written so, by `difference_to_next`.
        """
        if not late.is_overdue:
            return None
        under_way = [self._under_way_on(rank, store) for rank in range(self._ranks.size)]
        everyone = dict(zip(self._ranks.global_ranks, under_way, strict=True))
        here = {rank: each[str(late.launch)] for rank, each in everyone.items() if str(late.launch) in each}
        missing = [rank for rank in everyone if rank not in here]
        return words_for(missing, here, late.model, late.limit) if missing else None

    def _under_way_on(self, rank: int, store: dist.Store) -> dict[str, int]:
        """What a rank has written last: what its launches under way are for."""
        key = self._key(rank)
        return json.loads(store.get(key)) if store.check([key]) else {}

    def _key(self, rank: int) -> str:
        return f"flatfsdp/under way/{self._ranks.name}/{rank}"
