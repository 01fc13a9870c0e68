"""Changes, while a program runs, how long ranks wait for each other in collectives.

In:   seconds.
Out:  that timeout in all process groups of this process, including those that FlatFSDP has made.
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
    and a rank that does not come later has failed.  Includes the process groups that FlatFSDP has made beside
    yours; groups made later have timeouts of their own.  Does nothing without a process group.

    Args:
        seconds: timeout in seconds, at least 0.001.

    Raises:
        ValueError: if it is not finite, or less than that.
        RuntimeError: if some rank does not call it within the previous timeout.
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
