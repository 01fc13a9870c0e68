"""Ranks wait for each other before they do something that all have to do, and learn who does not come.

In:   what a rank is about to do, such as "save_pretrained".
Out:  all ranks are there, or RuntimeError on those that are, with the missing ones.

Without it, a rank that calls a collective method by itself waits in its first collective for the timeout of
the process group.  Ranks meet in the store of the process group, so that nothing is launched.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import default_store

PATIENCE = 60.0
"""Seconds that ranks wait for each other."""
_LONGEST_PAUSE = 0.1


def meet(ranks: Ranks, doing: str) -> None:
    """Waits until all of these ranks are about to do the same.

    Raises:
        RuntimeError: if some have not come after `PATIENCE` seconds.
    """
    if ranks.size == 1:
        return
    store: dist.Store = default_store()
    keys = [f"flatfsdp/meeting/{ranks.name}/{doing}/{rank}" for rank in range(ranks.size)]
    # How often a rank has come: so many times the others have to come, too.
    own = store.add(keys[ranks.rank], 1)
    end, pause = time.monotonic() + PATIENCE, 0.001
    while missing := [rank for rank, key in enumerate(keys) if store.add(key, 0) < own]:
        if time.monotonic() > end:
            store.add(keys[ranks.rank], -1)
            names = ", ".join(str(ranks.global_ranks[rank]) for rank in missing)
            raise RuntimeError(
                f"{doing} is collective, and rank{'s' * (len(missing) > 1)} {names} did not call it within "
                f"{PATIENCE:.0f} s; call it on all ranks, not inside `if rank == 0`"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
