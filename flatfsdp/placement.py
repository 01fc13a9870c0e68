"""What the engine has to know of tensor parallelism: which parameters are split, which are on all ranks.

In:   the attributes that layers give to their parameters (`tensor_parallel.py`).
Out:  a `Placement` for each parameter, and for a split one a `Partition`.
Next: `fsdp.py` makes a flat group for each placement; `reduce.py` sums by it, `optim/clip.py` counts by it,
      and `checkpoint/` joins whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from flatfsdp.comm import Ranks


class Placement(Enum):
    """How the ranks of one tensor-parallel group share a parameter."""

    SPLIT = "split"
    """Each has a part of it."""
    EQUAL = "equal"
    """Each has all of it, and of its gradient."""
    PARTIAL = "partial"
    """Each has all of it, and a gradient that is one part of a sum over them."""


@dataclass(frozen=True)
class Partition:
    """How a whole tensor is cut: each of some parts, evenly over the ranks.

    Attributes:
        dim: along which it is cut.
        sizes: of the parts of the whole dimension; rank r has the r-th piece of each, one after the other.
    """

    dim: int
    sizes: tuple[int, ...]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor of which every rank has a part of this shape."""
        return (*shape[: self.dim], sum(self.sizes), *shape[self.dim + 1 :])

    def ranks(self, shape: Sequence[int]) -> int:
        """Over how many ranks the whole is split, if a rank's part has this shape; 0 if no number fits."""
        size = shape[self.dim]
        count = sum(self.sizes) // size if size else 0
        fits = count and sum(self.sizes) == count * size and not any(part % count for part in self.sizes)
        return count if fits else 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all ranks' parts, in rank order."""
        pieces = [part.split([size // len(parts) for size in self.sizes], self.dim) for part in parts]
        return torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part], self.dim)


def partition_of(parameter: nn.Parameter) -> Partition | None:
    """As its layer has declared; None for a parameter that is not split, or over one rank."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    partition = Partition(parameter.partition_dim, tuple(parameter.partition_sizes))  # type: ignore[attr-defined]
    return None if partition.ranks(parameter.shape) == 1 else partition


def placement_of(parameter: nn.Parameter) -> Placement:
    """One that no layer has declared is on all ranks, and so is its gradient."""
    if partition_of(parameter) is not None:
        return Placement.SPLIT
    return Placement.PARTIAL if getattr(parameter, "sequence_parallel", False) else Placement.EQUAL


def check_placement(name: str, parameter: nn.Parameter, tensor: Ranks) -> None:
    """
    Args:
        tensor: the tensor-parallel ranks that FlatFSDP was given.

    Raises:
        ValueError: if a layer has declared the parameter for other ranks than these.
    """
    placement, partition = placement_of(parameter), partition_of(parameter)
    if placement is Placement.EQUAL:
        return
    if tensor.size == 1:
        what = "a part of a whole" if partition else "one whose gradient is summed over tensor-parallel ranks"
        raise ValueError(
            f"parameter {name} is {what}, but FlatFSDP got no tp_group of several ranks; pass the tp_group "
            "of its layer"
        )
    if partition is not None and partition.ranks(parameter.shape) != tensor.size:
        raise ValueError(
            f"parameter {name} has shape {list(parameter.shape)}, its dimension {partition.dim} is a part of "
            f"{'+'.join(map(str, partition.sizes))}, and FlatFSDP got a tp_group of {tensor.size} ranks; "
            "pass the tp_group of its layer"
        )
