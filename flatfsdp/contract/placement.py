"""What the engine has to know of tensor parallelism: which parameters are split, which are on all ranks.

In:   the attributes that layers give to their parameters (`tensor_parallel.py`).
Out:  a `Placement` for each parameter, and for a split one a `Partition`.
Next: `engine/claim.py` keeps placements apart; `engine/step/reduce.py` sums by them, `optim/clip.py` counts
      by them, and `checkpoint/` joins whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import (
    EXCHANGES,
    PARTITION_DIM,
    PARTITION_SIZES,
    PARTITION_STRIDE,
    SEQUENCE_PARALLEL,
    TENSOR_MODEL_PARALLEL,
    TENSOR_PARALLEL_RANKS,
)


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
        """Shape of the whole tensor, of which every rank has a part of this shape."""
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


def partition_of(parameter: nn.Parameter, tensor: Ranks) -> Partition | None:
    """Partition that a layer has declared; None for a parameter that is not split, or over one rank.

    Args:
        tensor: the tensor-parallel ranks that FlatFSDP was given.
    """
    if tensor.size == 1 or not TENSOR_MODEL_PARALLEL.of(parameter):
        return None
    partition = _declared(parameter, tensor)
    return None if partition.ranks(parameter.shape) == 1 else partition


def _declared(parameter: nn.Parameter, tensor: Ranks) -> Partition:
    dim, sizes = PARTITION_DIM.of(parameter), PARTITION_SIZES.of(parameter)
    if sizes is None:
        # Megatron and Transformer Engine mean as many equal parts.
        stride = PARTITION_STRIDE.of(parameter)
        sizes = (parameter.shape[dim] * tensor.size // stride,) * stride
    return Partition(dim, tuple(sizes))


def placement_of(parameter: nn.Parameter, tensor: Ranks) -> Placement:
    """One that no layer has declared is on all ranks, and so is its gradient."""
    if partition_of(parameter, tensor) is not None:
        return Placement.SPLIT
    is_partial = tensor.size > 1 and SEQUENCE_PARALLEL.of(parameter)
    return Placement.PARTIAL if is_partial else Placement.EQUAL


def is_shared(parameter: Tensor) -> bool:
    """Whether other tensor-parallel ranks have other parts of it or of its gradient, or the same."""
    sizes = PARTITION_SIZES.of(parameter)
    is_part = bool(sizes) and parameter.shape[PARTITION_DIM.of(parameter)] != sum(sizes or ())
    return is_part or bool(TENSOR_PARALLEL_RANKS.of(parameter)) or SEQUENCE_PARALLEL.of(parameter)


def check_placement(name: str, parameter: nn.Parameter, tensor: Ranks) -> None:
    """Checks that a layer's marks and the ranks of FlatFSDP say the same.

    Args:
        tensor: the tensor-parallel ranks that FlatFSDP was given.

    Raises:
        ValueError: if a layer has declared the parameter for other ranks than these, or as none of them could
            have it.
    """
    ranks = list(TENSOR_PARALLEL_RANKS.of(parameter))
    if ranks and ranks != tensor.global_ranks:
        given = "no tp_group" if tensor.group is None else f"a tp_group of ranks {tensor.global_ranks}"
        raise ValueError(
            f"parameter {name} is of a layer that ranks {ranks} share, and FlatFSDP got {given}; pass the "
            "tp_group of the layer, and the ranks with the same part as mesh or process_group"
        )
    if TENSOR_MODEL_PARALLEL.of(parameter):
        _check_split(name, parameter, tensor)
    elif SEQUENCE_PARALLEL.of(parameter) and tensor.group is None:
        raise ValueError(
            f"parameter {name} has a gradient that is summed over tensor-parallel ranks, and FlatFSDP got no "
            "tp_group; pass that of its layer"
        )


def _check_split(name: str, parameter: nn.Parameter, tensor: Ranks) -> None:
    sizes = PARTITION_SIZES.of(parameter)
    if sizes is None and tensor.size == 1:
        # Megatron marks what one rank has, too.
        return
    dim = PARTITION_DIM.of(parameter)
    is_known = 0 <= dim < parameter.dim()
    if not is_known or _declared(parameter, tensor).ranks(parameter.shape) not in (1, tensor.size):
        whole = "" if sizes is None else f" of a whole of {'+'.join(map(str, sizes))}"
        given = "no tp_group" if tensor.group is None else f"a tp_group of {tensor.size} ranks"
        raise ValueError(
            f"parameter {name}, of shape {list(parameter.shape)}, is said to be a part{whole} along "
            f"dimension {dim}, and FlatFSDP got {given}; pass the tp_group of its layer"
        )


def check_marks(path: str, owner: nn.Module) -> None:
    """Checks that all parameters of a shared layer are marked.

    Raises:
        ValueError: if several ranks share a layer, and it has a parameter that does not say so.
    """
    exchanges = EXCHANGES.of(owner) or {}
    if all(exchange.ranks.size == 1 for exchange in exchanges.values()):
        return
    for exchange in exchanges.values():
        # Raises where nobody knows which they are.
        _ = exchange.ranks.group
    for name, parameter in owner._parameters.items():
        if parameter is not None and not TENSOR_MODEL_PARALLEL.is_on(parameter):
            raise ValueError(
                f"parameter {f'{path}.{name}'.lstrip('.')} is of a layer that several ranks share, and does "
                "not say how: it is a copy without attributes, or one that you have added; use "
                "flatfsdp.contract.tensor_parallel.declare_split or declare_whole"
            )
