"""Launches in flight over all communicators of the same ranks, in the order in which the host makes them.

In:   the purpose of each launch (`identity.py`), from the journals of these communicators (`journal.py`).
Out:  two ranks whose launches differ though no number arrives, and ranks that do not come, for `watch.py`.

Collectives over two communicators can block each other.  For example, one rank takes a norm, and behind it
waits a gather that the others need before they reach the norm; or one rank leaves out a gather, behind which
the others' reduction waits.  Each rank then writes its launches in flight into the store of the process
group, and reads those of the next rank.
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
        store.set(self._key(rank), json.dumps(own))
        theirs = self._under_way_on(following, store)
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
        under_way = [self._under_way_on(rank, store) for rank in range(self._ranks.size)]
        everyone = dict(zip(self._ranks.global_ranks, under_way, strict=True))
        here = {rank: each[str(late.launch)] for rank, each in everyone.items() if str(late.launch) in each}
        missing = [rank for rank in everyone if rank not in here]
        return words_for(missing, here, late.model, late.limit) if missing else None

    def _under_way_on(self, rank: int, store: dist.Store) -> dict[str, int]:
        """The purposes of a rank's launches in flight, as it wrote them last."""
        key = self._key(rank)
        return json.loads(store.get(key)) if store.check([key]) else {}

    def _key(self, rank: int) -> str:
        return f"flatfsdp/under way/{self._ranks.name}/{rank}"
