"""Ranks that are only imagined, for plans: a process group of any size in one process.

On the meta device there is nothing to send: collectives return at once, and nobody compares ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from flatfsdp.torch_private import begin_imagined_ranks


@contextmanager
def imagined_ranks(world: int) -> Iterator[None]:
    """Makes this process rank 0 of `world` ranks inside the `with` block.

    Raises:
        RuntimeError: if the process belongs to real ranks already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a plan imagines its ranks, and this process has a process group already; plan before "
            "init_process_group, or in a process of its own"
        )
    begin_imagined_ranks(world)
    try:
        yield
    finally:
        dist.destroy_process_group()
