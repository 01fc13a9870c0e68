"""Ranks wait for each other before they do something that all have to do, and learn who does not come.

In:   what a rank is about to do, such as "save_pretrained".
Out:  all ranks are there, or RuntimeError on those that are, with the missing ones.

Without it, a rank that calls a collective method by itself would meet whatever the others do next.  Ranks
meet in the store of the process group, so that nothing is launched.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from flatfsdp.comm.checking.absence import named
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import default_store

_LONGEST_PAUSE = 0.1
_MET = "met"


def meet(ranks: Ranks, doing: str, rank_timeout: float) -> None:
    """Waits until all of these ranks are about to do the same.

    Args:
        rank_timeout: seconds to wait for the others; that of `FlatFSDP`.

    Raises:
        RuntimeError: on all ranks that have come, if some have not by then.
    """
    if ranks.size == 1:
        return
    store: dist.Store = default_store()
    given_up = f"flatfsdp/{ranks.name}/{doing}/given up"
    # Those who came to a meeting that was given up come again from the beginning.
    meeting = f"flatfsdp/{ranks.name}/{doing}/{store.add(given_up, 0)}"
    keys = [f"{meeting}/{rank}" for rank in range(ranks.size)]
    # How often a rank has come: so many times the others have to come, too.
    own = store.add(keys[ranks.rank], 1)
    # Whoever is the first to decide decides for all, so that none goes on alone.
    decision, give_up = f"{meeting}/{own}-th", f"given up by {ranks.rank}"
    begin, pause = time.monotonic(), 0.001
    while missing := [rank for rank, key in enumerate(keys) if store.add(key, 0) < own]:
        waited = time.monotonic() - begin
        if waited > rank_timeout or store.check([decision]):
            decided = store.compare_set(decision, "", give_up).decode()
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    else:
        decided = store.compare_set(decision, "", _MET).decode()
    if decided == _MET:
        return
    if decided == give_up:
        store.add(given_up, 1)
    if not missing:
        raise RuntimeError(f"this rank called {doing} when another one had given up waiting for it")
    raise RuntimeError(
        f"{_absent(ranks, missing, doing, time.monotonic() - begin)}; call it on all ranks, not inside "
        "`if rank == 0`"
    )


def _absent(ranks: Ranks, missing: list[int], doing: str, waited: float) -> str:
    absent = named([ranks.global_ranks[rank] for rank in missing])
    return f"{doing} is collective, and {absent} did not call it within {waited:.0f} s"
