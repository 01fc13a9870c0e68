"""`Grid`: the ranks that shard, replicate and split the parameters of one unit.

In:   arguments of `FlatFSDP`: a process group or a mesh, and a tensor-parallel group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.launch import under_torchrun
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import ALONE, Ranks, default_group


@dataclass(frozen=True)
class Grid:
    """Ranks of one unit: parameters are sharded over `shard` and replicated over `replicate`.

    These two are the data-parallel ranks.  The ranks in `tensor` have other parts of the same parameters
    (tensor parallelism).
    """

    shard: Ranks
    replicate: Ranks
    tensor: Ranks = ALONE

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the parameters of this tensor-parallel rank are spread over."""
        return self.shard.size * self.replicate.size

    @property
    def partners(self) -> tuple[Ranks, ...]:
        """Groups of ranks with the other parts of a gradient, which is sharded and may be split."""
        return self.shard, self.tensor

    @property
    def dimensions(self) -> tuple[Ranks, ...]:
        """The three dimensions: shards, replicas and tensor-parallel ranks."""
        return self.shard, self.replicate, self.tensor

    def make_group(self, device: torch.device) -> dist.ProcessGroup | None:
        """Makes a group of all ranks of the grid; None for a single rank.  Collective.

        Args:
            device: device to communicate on.
        """
        several = [ranks for ranks in self.dimensions if ranks.size > 1]
        if len(several) < 2:
            return several[0].group if several else None
        members = [dist.get_rank()]
        for ranks in several:
            members = [each for theirs in all_gather_object(members, ranks, device) for each in theirs]
        backend = dist.get_backend(several[0].group)
        return dist.new_group(sorted(members), backend=backend, use_local_synchronization=True)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one in all dimensions."""
        return all(ranks.rank == 0 for ranks in self.dimensions)

    @staticmethod
    def of(
        process_group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        shard: bool,
        tp_group: dist.ProcessGroup | None = None,
    ) -> Grid:
        """Resolves the constructor's arguments.

        `mesh` is 1-D (shard) or 2-D (replicate, shard).  The default is the default process group, or this
        rank alone if torch.distributed is not initialised.  `shard=False` replicates over all.

        Raises:
            TypeError: for a DeviceMesh in place of a group.
            RuntimeError: in one of several processes of torchrun, if torch.distributed is not initialised.
            ValueError: for both a mesh and a process group; for a mesh of another number of dimensions; if
                tp_group shares ranks other than this one with the data-parallel ranks.
        """
        if isinstance(process_group, DeviceMesh):
            raise TypeError("process_group is a DeviceMesh; pass it as mesh=")
        if isinstance(tp_group, DeviceMesh):
            raise TypeError("tp_group is a DeviceMesh; pass its process group, mesh['tp'].get_group()")
        shard_ranks, replicate_ranks = _data_parallel(process_group, mesh, shard)
        grid = Grid(shard_ranks, replicate_ranks, Ranks.of(tp_group))
        grid.tensor.require_apart(shard_ranks)
        grid.tensor.require_apart(replicate_ranks)
        return grid


def _data_parallel(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, shard: bool
) -> tuple[Ranks, Ranks]:
    """The ranks to shard over, and those to replicate over."""
    if mesh is not None and process_group is not None:
        raise ValueError("pass either process_group or mesh, not both: a mesh brings its own groups")
    if mesh is not None and mesh.ndim == 2:
        if not shard:
            raise ValueError("shard=False replicates over one group; pass a 1-D mesh, not (replicate, shard)")
        return Ranks.of(mesh.get_group(1)), Ranks.of(mesh.get_group(0))
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"mesh has {mesh.ndim} dimensions; pass (shard,) or (replicate, shard)")
        process_group = mesh.get_group()
    if process_group is None:
        process_group = default_group()
        if process_group is None and under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
            raise RuntimeError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes, and each would train a model by "
                "itself; call torch.distributed.init_process_group() before the model is sharded"
            )
    every = Ranks.of(process_group)
    return (every, ALONE) if shard else (ALONE, every)
