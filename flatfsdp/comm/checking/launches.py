"""Launches under way over all communicators of the same ranks, in the order in which the host makes them.

In:   what each launch is for (`identity.py`), from the journals of these communicators (`journal.py`).
Out:  two ranks whose launches differ although no number arrives, for `watch.py`.

Collectives over two communicators can wait for each other.  One rank takes a norm, say, and behind it waits a
gather that the others need before they come to the norm; or one leaves out a gather, behind which the others'
reduction waits.  Then each rank writes what it has under way into the store of the process group, and reads
what the next rank has.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Difference
from flatfsdp.comm.ranks import Ranks


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
        key = f"flatfsdp/under way/{self._ranks.name}"
        store.set(f"{key}/{rank}", json.dumps(own))
        if not store.check([f"{key}/{following}"]):
            return None
        theirs = json.loads(store.get(f"{key}/{following}"))
        numbers = [0] * self._ranks.size
        for launch, number in sorted(own.items()):
            numbers[rank], numbers[following] = number, theirs.get(str(launch), 0)
            difference = Difference.among(numbers, self._ranks)
            if difference is not None:
                return difference
        return None
