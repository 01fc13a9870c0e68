"""Names the ranks that did not come to a launch, once waiting for them has failed.

In:   the launch in which this rank has waited in vain.
Out:  a message that names the missing ranks, and says what the others are in.

A backend only says that an address timed out, or closed its connection.  So each rank whose launch has failed
writes its launch into the store of the process group; ranks that have written nothing a moment later are
missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from flatfsdp.comm.checking.identity import Identity, ModelIdentity, described
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import default_store

SETTLING = 2.0
"""Seconds within which all ranks that waited in the same launch learn that it was in vain."""

_PAUSE = 0.01
_SHOWN = 4


class Waited(NamedTuple):
    """Entry in the store of a rank that has waited in vain.

    Attributes:
        number: number of the launch it waited in (`identity.py`).
        gave_up: whether its time limit had passed; if not, a connection was closed.
    """

    number: int
    gave_up: bool


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
        everyone = _tell_and_hear(default_store(), ranks, launch, Waited(identity.number, gave_up))
    except RuntimeError:
        everyone = None
    if everyone is None:
        return f"{lost}  {_NO_STORE}"
    missing = [rank for index, rank in enumerate(ranks.global_ranks) if index not in everyone]
    here = {ranks.global_ranks[index]: each for index, each in everyone.items()}
    impatient = [rank for rank, each in here.items() if each.gave_up]
    numbers = {rank: each.number for rank, each in here.items()}
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


def _tell_and_hear(store: dist.Store, ranks: Ranks, launch: int, own: Waited) -> dict[int, Waited] | None:
    """Exchanges entries with the ranks that waited in this launch, by their number among `ranks`.

    None if the store does not answer.
    """
    keys = [f"flatfsdp/in vain/{ranks.name}/{launch}/{rank}" for rank in range(ranks.size)]
    found = {ranks.rank: own}
    answers = threading.Event()

    def tell_and_hear() -> None:
        with suppress(RuntimeError):  # the store has gone with the rank that had it
            # Told before asking: another rank may be asking for the last time now.
            store.set(keys[ranks.rank], json.dumps(own))
            deadline = time.monotonic() + SETTLING
            while len(found) < ranks.size and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                for rank, key in enumerate(keys):
                    # `get` alone would wait for a key that nobody sets.
                    if rank not in found and store.check([key]):
                        found[rank] = Waited(*json.loads(store.get(key)))
            answers.set()

    # A store in a stopped process never answers.
    asking = threading.Thread(target=tell_and_hear, daemon=True)
    asking.start()
    asking.join(2 * SETTLING)
    # Without the event, the thread may still be writing to `found`.
    return found if answers.is_set() else None
