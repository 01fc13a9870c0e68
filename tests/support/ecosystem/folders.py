"""Folders that ranks share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def shared_folder() -> Iterator[Path]:
    """The first rank's folder, on all ranks, removed when all have left it.  Collective, at both ends."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()
