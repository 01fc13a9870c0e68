"""Lets ranks wait for each other before a collective call, and name those that do not come.

In:   the call that a rank is about to make, such as "save_pretrained".
Out:  all ranks are there; otherwise RuntimeError on those that are, which names the missing ones.

Without it, a collective method called on one rank alone would pair with whatever the others do next.  Ranks
meet in the store of the process group, so nothing is launched.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from flatfsdp.comm.checking.reports import named
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import default_store

_LONGEST_PAUSE = 0.1
_MET = "met"


def meet(ranks: Ranks, doing: str, timeout: float) -> None:
    """Waits until all of these ranks are about to make the same call.

    Args:
        ranks: ranks that meet.
        doing: name of the call.
        timeout: seconds to wait for the others, as set in `FlatFSDP`.

    Raises:
        RuntimeError: on all ranks that have come, if others have not by then.
    """
    if ranks.size == 1:
        return
    store: dist.Store = default_store()
    given_up = f"flatfsdp/{ranks.name}/{doing}/given up"
    # Ranks that came to a meeting that was given up start again from the beginning.
    meeting = f"flatfsdp/{ranks.name}/{doing}/{store.add(given_up, 0)}"
    keys = [f"{meeting}/{rank}" for rank in range(ranks.size)]
    # The number of times this rank has come, which is how often the others have to come, too.
    own = store.add(keys[ranks.rank], 1)
    # The first rank to decide does so for all, so that none goes on alone.
    decision, give_up = f"{meeting}/{own}-th", f"given up by {ranks.rank}"
    begin, pause = time.monotonic(), 0.001
    while missing := [rank for rank, key in enumerate(keys) if store.add(key, 0) < own]:
        waited = time.monotonic() - begin
        if waited > timeout or store.check([decision]):
            decided = store.compare_set(decision, "", give_up).decode()
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    else:
        decided = store.compare_set(decision, "", _MET).decode()
    if decided == _MET:
        return
    if decided == give_up:
        # By one rank, the one that gave up: the next meeting then has a name that is new to all.
        store.add(given_up, 1)
    if not missing:
        raise RuntimeError(f"this rank called {doing} when another one had given up waiting for it")
    absent, waited = named([ranks.global_ranks[rank] for rank in missing]), time.monotonic() - begin
    raise RuntimeError(
        f"{doing} is collective, and {absent} did not call it within {waited:.0f} s; call it on all ranks, "
        "not inside `if rank == 0`"
    )
