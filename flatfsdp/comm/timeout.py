"""How long ranks wait for each other in collectives, changed while a program runs.

In:   seconds.
Out:  that timeout in all process groups of this process, also in those that FlatFSDP has made.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch

from flatfsdp.comm.meeting import meet
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.torch_private import process_groups, timeout_of


def set_timeout(seconds: float) -> None:
    """Sets how long collectives that begin from now on wait for other ranks, in all process groups.

    Call it after the first step, on all ranks: until then ranks read data and compile, each at its own pace,
    and later one that does not come has failed.  Process groups that FlatFSDP has made beside yours, which
    nobody else knows, are included; those that are made later have timeouts of their own.  Without a process
    group nothing happens.

    Args:
        seconds: at least 0.001.

    Raises:
        ValueError: if that is no such number.
        RuntimeError: if some rank does not call it within the timeout from before.
    """
    if not 0.001 <= seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; a timeout is a finite number of them, at least 0.001")
    everyone = default_group()
    if everyone is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    # A rank that is ahead would not wait long enough for one that is still in its first step.
    before = timeout_of(everyone)
    meet(Ranks.of(everyone), "set_timeout", math.inf if before is None else before.total_seconds())
    for group in process_groups():
        group.set_timeout(timedelta(seconds=seconds))
