"""The end of process groups whose collectives will not end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch

from flatfsdp.comm.ranks import Ranks

ABORT_SECONDS = 10.0
"""How long the main thread waits for NCCL to end what is under way."""


def abort(communicators: Iterable[Ranks], device: torch.device) -> None:
    """Ends what is under way over these ranks with NCCL; nobody can use their process groups any more.

    All at once: NCCL gives memory back, for which CUDA waits for all kernels, another communicator's, too.
    """
    aborts = [ranks.group._get_backend(device).abort for ranks in communicators if ranks.group is not None]
    threads = [threading.Thread(target=each, daemon=True) for each in aborts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
