"""`Parallelism`: how ranks share a model, in numbers, for a mesh, a plan and a report alike.

In:   sizes; that of the shards, or of the replicas, may be left to fill the ranks.
Out:  a `Parallelism`; no process group is needed.
Next: `mesh.py` makes process groups for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
"""Dimensions of the mesh of all ranks, outermost first."""


@dataclass(frozen=True)
class Parallelism:
    """Number of ranks in each dimension of the mesh.

    Attributes:
        pp: number of pipeline ranks.
        dp_replicate: number of replicas of each set of shards.
        dp_shard: number of ranks that parameters are sharded over.
        tp: number of ranks that share each layer.
        sequence_parallel: split activations between layers over the tp ranks, too; no effect if tp is 1.

    Raises:
        ValueError: if a size is not positive.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it has to be at least 1")
        if self.tp == 1:
            # With one rank it has no effect, so the value equals one that never asked for it.
            object.__setattr__(self, "sequence_parallel", False)

    @staticmethod
    def over(world: int, *, dp_replicate: int = 1, dp_shard: int = -1, **others: Any) -> Parallelism:
        """Arranges `world` ranks.

        Args:
            world: number of ranks.
            dp_replicate: number of replicas of each set of shards; -1 for as many as there are ranks left.
            dp_shard: number of ranks that parameters are sharded over; -1 for all that are left.
            others: the other attributes, by name.

        Raises:
            ValueError: if a size is not positive, both are -1, or the sizes do not give the number of ranks.
        """
        sizes: dict[str, Any] = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        fills = [name for name, size in sizes.items() if size == -1]
        if len(fills) > 1:
            raise ValueError("dp_replicate and dp_shard are both -1; pass one of them")
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"{name} is {size}; it has to be at least 1, or -1 for all ranks left")
        for name in fills:
            rest = Parallelism(**others, **{**sizes, name: 1})
            if world % rest.world:
                raise ValueError(
                    f"{_product({**rest.sizes, name: -1})} needs a multiple of {rest.world} ranks, "
                    f"and there are {world}"
                )
            sizes[name] = world // rest.world
        found = Parallelism(**others, **sizes)
        if (needed := found.world) != world:
            raise ValueError(
                f"{_product(found.sizes)} needs {needed} ranks, and there are {world}; leave dp_shard out"
            )
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks in each dimension of the mesh."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return prod(self.sizes.values())

    @property
    def dp(self) -> int:
        """Number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that activations between layers are split over."""
        return self.tp if self.sequence_parallel else 1

    def __str__(self) -> str:
        """The sizes in words, such as "pp 4 x dp_shard 16 x tp 8 + SP"."""
        return _product(self.sizes) + (" + SP" if self.sequence_parallel else "")


def _product(sizes: Mapping[str, int]) -> str:
    """Sizes above 1 in words, such as pp 2 x tp 2; tp is last, and + SP may follow."""
    factors = [f"{name} {'?' if size == -1 else size}" for name, size in sizes.items() if size != 1]
    return " x ".join(factors) or "no parallelism"
