"""Ranks that are only imagined, for plans: process groups of any size in one process.

On the meta device there is nothing to send: collectives return at once, and nobody compares ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.torch_private import begin_imagined_ranks


class Imagined(NamedTuple):
    """Groups of rank 0: the options of `shard` with these names."""

    mesh: DeviceMesh | None
    tp_group: dist.ProcessGroup | None


@contextmanager
def imagined_ranks(ranks: Parallelism) -> Iterator[Imagined]:
    """Makes this process the first rank of a pipeline stage inside the `with` block.

    Raises:
        RuntimeError: if the process belongs to real ranks already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a plan imagines its ranks, and this process has a process group already; plan before "
            "init_process_group, or in a process of its own"
        )
    tp, shards = ranks.tp, ranks.dp_shard
    begin_imagined_ranks(ranks.dp * tp)
    try:
        if ranks.dp * tp == shards:
            yield Imagined(None, None)
            return
        # Only those that this rank is in; of all others nobody asks.
        of_shards = dist.new_group(list(range(0, shards * tp, tp)))
        groups = [of_shards]
        numbers = list(range(0, shards * tp, tp))
        mesh = DeviceMesh.from_group(of_shards, "cpu", numbers, mesh_dim_names=("dp_shard",))
        if ranks.dp_replicate > 1:
            replicas = list(range(0, ranks.dp * tp, shards * tp))
            groups.insert(0, dist.new_group(replicas))
            rows = [[first + number for number in numbers] for first in replicas]
            mesh = DeviceMesh.from_group(groups, "cpu", rows, mesh_dim_names=("dp_replicate", "dp_shard"))
        yield Imagined(mesh, dist.new_group(list(range(tp))) if tp > 1 else None)
    finally:
        dist.destroy_process_group()
