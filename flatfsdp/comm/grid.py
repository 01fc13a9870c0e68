"""`Grid`: the ranks that shard, replicate and split the parameters of one unit.

In:   the options mesh, dp_shard and tp_group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.device import indexed
from flatfsdp.comm.launch import under_torchrun
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import ALONE, Ranks, default_group, several


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
        others = several(self.dimensions)
        if len(others) < 2:
            return others[0].group if others else None
        members = [dist.get_rank()]
        # After each dimension a rank knows those that the dimension adds: a line, then a plane, then all.
        for ranks in others:
            members = [each for theirs in all_gather_object(members, ranks, device) for each in theirs]
        backend = dist.get_backend(others[0].group)
        # Only these ranks take part: others may have no part of this model.
        return dist.new_group(sorted(members), backend=backend, use_local_synchronization=True)

    def require_reach(self, device: torch.device) -> None:
        """Raises ValueError if the backend of these ranks cannot reach the device."""
        groups = [ranks.group for ranks in self.dimensions if ranks.group is not None]
        if device.type == "cpu" and any(str(dist.get_backend(group)) == "nccl" for group in groups):
            raise ValueError("the process group is NCCL's and parameters are on the CPU; pass device='cuda'")

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one in all dimensions."""
        return all(ranks.rank == 0 for ranks in self.dimensions)

    @property
    def is_first_of_data(self) -> bool:
        """Whether this rank is the first one among the data-parallel ranks."""
        return self.shard.rank == 0 and self.replicate.rank == 0

    @staticmethod
    def of(mesh: DeviceMesh | None, tp_group: dist.ProcessGroup | None = None) -> Grid:
        """Resolves the options of these names.

        `mesh` is 1-D (shard) or 2-D (replicate, shard).  The default is the default process group, or this
        rank alone if torch.distributed is not initialised.

        Raises:
            TypeError: for something else than a DeviceMesh, or a DeviceMesh in place of tp_group.
            RuntimeError: in one of several processes of torchrun, if torch.distributed is not initialised.
            ValueError: for a mesh of another number of dimensions, or without this rank; if tp_group shares
                ranks other than this one with the data-parallel ranks.
        """
        if isinstance(tp_group, DeviceMesh):
            raise TypeError("tp_group is a DeviceMesh; pass its process group, mesh['tp'].get_group()")
        shard, replicate = _every_rank() if mesh is None else _ranks_of(mesh)
        grid = Grid(shard, replicate, Ranks.of(tp_group))
        grid.tensor.require_apart(shard)
        grid.tensor.require_apart(replicate)
        return grid


def require_same_ranks(grids: Iterable[Grid], doing: str) -> None:
    """Raises ValueError, on every rank, if parameters are spread over different numbers of ranks.

    In that case groups of ranks may have parameters of their own under the same names (experts).
    """
    sizes = sorted({grid.num_ranks for grid in grids})
    if len(sizes) > 1:
        raise ValueError(
            f"some units are spread over {sizes[0]} ranks and others over {sizes[-1]}, and {doing} would "
            "keep one group's parameters; use checkpoint.local_state_dict, or treat such units by themselves"
        )


def mesh_of_shard_groups(dp_shard: int) -> DeviceMesh | None:
    """Arranges all ranks as replicas of groups of neighbours; None if one group has them all.

    Collective over all ranks.  Calls with the same number share their process groups.

    Args:
        dp_shard: number of ranks in a group.

    Raises:
        ValueError: if it is no positive number, or does not divide the number of ranks.
        RuntimeError: if ranks pass other numbers; in one of several processes of torchrun, if
            torch.distributed is not initialised.
    """
    if not isinstance(dp_shard, int) or isinstance(dp_shard, bool) or dp_shard < 1:
        raise ValueError(f"dp_shard is {dp_shard!r}; it must be the number of ranks that share parameters")
    everyone, _ = _every_rank()
    if everyone.size % dp_shard:
        raise ValueError(f"dp_shard is {dp_shard}; it has to divide the number of ranks, {everyone.size}")
    if everyone.group is None:
        return None
    device = torch.device("cuda" if "nccl" in dist.get_backend(everyone.group) else "cpu")
    # Before groups are made, in which ranks would wait for each other.
    check_same_on_all_ranks([f"dp_shard={dp_shard}"], [everyone], indexed(device), timeout=None)
    if dp_shard == everyone.size:
        return None
    ranks = torch.arange(everyone.size).view(-1, dp_shard)
    row, column = divmod(everyone.rank, dp_shard)
    lines = [ranks[:, column], ranks[row]]
    groups = [group for line in lines if (group := Ranks.among(tuple(line.tolist())).group) is not None]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def _every_rank() -> tuple[Ranks, Ranks]:
    """The ranks to shard over, and those to replicate over, without a mesh."""
    group = default_group()
    if group is None and under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise RuntimeError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, and each would train a model by "
            "itself; call torch.distributed.init_process_group() before the model is sharded"
        )
    return Ranks.of(group), ALONE


def _ranks_of(mesh: DeviceMesh) -> tuple[Ranks, Ranks]:
    """The ranks to shard over, and those to replicate over."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; it must be a DeviceMesh: DeviceMesh.from_group(group, 'cuda') "
            "makes one of a process group, and make_mesh(...).dp is one"
        )
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; pass (shard,) or (replicate, shard)")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in mesh, ranks {mesh.mesh.tolist()}; pass its own")
    if mesh.ndim == 1:
        return Ranks.of(mesh.get_group()), ALONE
    # A dimension of one rank needs no communicator.
    replicate, shard = (Ranks.of(mesh.get_group(each)) if mesh.size(each) > 1 else ALONE for each in (0, 1))
    return shard, replicate
