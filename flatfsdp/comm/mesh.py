"""The ranks that share pipeline stages, replicas, shards and tensor-parallel layers.

In:   the number of ranks of each kind of parallelism.
Out:  a `ParallelMesh`: groups and meshes for layers, FlatFSDP, FlatStage and FP8 regions.

    pp            outermost: stages exchange activations only, and may be on different hosts
    dp_replicate
    dp_shard
    tp            innermost: neighbours exchange activations several times a layer
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatfsdp.comm.parallelism import DIMENSIONS, Parallelism
from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.text_table import plain_table


@dataclass(frozen=True)
class ParallelMesh:
    """All ranks, in four dimensions.

    Attributes:
        parallelism: sizes of all kinds of parallelism.
        device_mesh: mesh with all of `DIMENSIONS`, including those of size one.
        dp_group: ranks that have the same part of the model and see other samples.
        stage_group: ranks that have the same pipeline stage; they share the scales of FP8 tensors.
    """

    parallelism: Parallelism
    device_mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup

    @property
    def dp(self) -> DeviceMesh:
        """Mesh for FlatFSDP: (dp_shard,), or (dp_replicate, dp_shard) if there are replicas."""
        if self.parallelism.dp_replicate == 1:
            return self.device_mesh["dp_shard"]
        return self.device_mesh["dp_replicate", "dp_shard"]

    @property
    def dimensions(self) -> tuple[Ranks, ...]:
        """Ranks that share each dimension with this one; together these reach all ranks."""
        return tuple(Ranks.of(self.device_mesh.get_group(name)) for name in DIMENSIONS)

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Process group of the pipeline ranks."""
        return self.device_mesh.get_group("pp")

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return self.parallelism.pp

    @property
    def pp_rank(self) -> int:
        """This rank's number among the pipeline ranks."""
        return self.device_mesh.get_local_rank("pp")

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, sharded and replicated together."""
        return dist.get_world_size(self.dp_group)

    @property
    def dp_rank(self) -> int:
        """Index of this rank's part of the samples."""
        return dist.get_rank(self.dp_group)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Process group of the tensor-parallel ranks."""
        return self.device_mesh.get_group("tp")

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.parallelism.tp

    @property
    def tp_rank(self) -> int:
        """This rank's number among the tensor-parallel ranks."""
        return self.device_mesh.get_local_rank("tp")

    def __str__(self) -> str:
        return f"{self.device_mesh.size()} ranks: {self.parallelism}"

    def table(self) -> str:
        """A table of all ranks: a column for each stage, a row for each data-parallel rank."""
        ranks = self.device_mesh.mesh
        lines = [["", *(f"pp {stage}" for stage in range(self.pp_size))]]
        sizes = self.parallelism
        for replica in range(sizes.dp_replicate):
            prefix = "" if sizes.dp_replicate == 1 else f"dp_replicate {replica}, "
            for shard in range(sizes.dp_shard):
                cells = ranks[:, replica, shard]
                lines.append([f"{prefix}dp_shard {shard}", *(_span(cell.tolist()) for cell in cells)])
        return plain_table(lines, right=range(1, 1 + self.pp_size))


def make_mesh(
    *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = -1, tp: int = 1, device_type: str | None = None
) -> ParallelMesh:
    """Arranges all ranks in a mesh, and makes its groups.  Collective over all ranks.

        mesh = make_mesh(pp=2, tp=2)
        layer = TransformerLayer(..., tp_group=mesh.tp_group)
        part = auto_wrap(part, by_class(TransformerLayer), mesh=mesh.dp, tp_group=mesh.tp_group)
        stage = FlatStage(part, mesh.pp_rank, mesh.pp_size, group=mesh.pp_group)

    Args:
        pp: number of pipeline ranks.
        dp_replicate: number of replicas of each set of shards; -1 for as many as there are ranks left.
        dp_shard: number of ranks that parameters are sharded over; -1 for all that are left.
        tp: number of ranks that share each layer.
        device_type: "cuda" or "cpu"; default: the device type of the default process group.

    Raises:
        RuntimeError: if torch.distributed is not initialised.
        ValueError: if a size is not positive, or the sizes do not give the number of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("make_mesh arranges existing ranks; call dist.init_process_group() first")
    parallelism = Parallelism.over(
        dist.get_world_size(), pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp
    )
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    device_mesh = init_device_mesh(device_type, tuple(parallelism.sizes.values()), mesh_dim_names=DIMENSIONS)
    ranks = device_mesh.mesh
    return ParallelMesh(
        parallelism,
        device_mesh,
        # One row for each pair of a stage and a tensor-parallel rank, with the ranks that differ in
        # dp_replicate and dp_shard alone.
        dp_group=_own_of(ranks.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).tolist()),
        stage_group=_own_of(ranks.flatten(1).tolist()),
    )


def _own_of(groups: list[list[int]]) -> dist.ProcessGroup:
    """Makes process groups of disjoint lists of all ranks; returns this rank's."""
    if len(groups) == 1:
        # All ranks have a group already; NCCL would take memory for another.
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # Every rank makes every group, in the same order, also those that it is not in.
    own, _ = dist.new_subgroups_by_enumeration(groups)
    assert own is not None
    return own


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
