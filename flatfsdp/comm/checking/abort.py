"""Aborts process groups whose collectives will never end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch

from flatfsdp.comm.ranks import Ranks

ABORT_SECONDS = 10.0
"""Seconds that the main thread waits for NCCL to end running collectives."""


def abort(communicators: Iterable[Ranks], device: torch.device) -> None:
    """Aborts the running NCCL collectives over these ranks; their process groups are unusable afterwards.

    Aborts all communicators at once: NCCL frees memory, and CUDA then waits for all kernels, including those
    of other communicators.
    """
    aborts = [ranks.group._get_backend(device).abort for ranks in communicators if ranks.group is not None]
    threads = [threading.Thread(target=each, daemon=True) for each in aborts]
    for thread in threads:
        thread.start()
    # One deadline for all, because this rank has an error to raise, and NCCL may never return.
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
