"""`Placement`: how tensor-parallel ranks share a parameter, as the engine sees it.

In:   the attributes that layers set on their parameters (`tensor_parallel.py`).
Out:  a `Placement` for each parameter, and for a split one a `Partition`.
Next: `engine/build/build_unit.py` groups by placement; `engine/step/reduce.py` sums by it, `optim/clip.py`
      counts by it, and `checkpoint/` joins whole tensors.
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
    """The way in which the ranks of a tensor-parallel group share a parameter."""

    SPLIT = "split"
    """Each rank has a part."""
    EQUAL = "equal"
    """Each rank has the whole parameter, and its whole gradient."""
    PARTIAL = "partial"
    """Each rank has the whole parameter, and one part of a sum of gradients."""


@dataclass(frozen=True)
class Partition:
    """Cut of a whole tensor: it has some parts, each of which is split evenly over the ranks.

    Attributes:
        dim: dimension along which it is cut.
        sizes: sizes of the parts of that dimension; rank r has the r-th piece of each, one after the other.
    """

    dim: int
    sizes: tuple[int, ...]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, given that of one rank's part."""
        return (*shape[: self.dim], sum(self.sizes), *shape[self.dim + 1 :])

    def ranks(self, shape: Sequence[int]) -> int:
        """Number of ranks that a part of this shape implies; 0 if no number fits."""
        size = shape[self.dim]
        count = sum(self.sizes) // size if size else 0
        fits = count and sum(self.sizes) == count * size and not any(part % count for part in self.sizes)
        return count if fits else 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins all ranks' parts, in rank order, to the whole tensor."""
        pieces = [part.split([size // len(parts) for size in self.sizes], self.dim) for part in parts]
        return torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part], self.dim)


def partition_of(parameter: nn.Parameter, tensor: Ranks) -> Partition | None:
    """Partition that a layer has declared; None for a parameter that is not split, or over one rank only.

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
        # In Megatron and Transformer Engine the stride counts equal parts.
        stride = PARTITION_STRIDE.of(parameter)
        sizes = (parameter.shape[dim] * tensor.size // stride,) * stride
    return Partition(dim, tuple(sizes))


def placement_of(parameter: nn.Parameter, tensor: Ranks) -> Placement:
    """Placement of a parameter; an undeclared one is whole on all ranks, and so is its gradient."""
    if partition_of(parameter, tensor) is not None:
        return Placement.SPLIT
    is_partial = tensor.size > 1 and SEQUENCE_PARALLEL.of(parameter)
    return Placement.PARTIAL if is_partial else Placement.EQUAL


def is_shared(parameter: Tensor) -> bool:
    """Whether other tensor-parallel ranks have the parameter, or other parts of it or of its gradient."""
    sizes = PARTITION_SIZES.of(parameter)
    is_part = bool(sizes) and parameter.shape[PARTITION_DIM.of(parameter)] != sum(sizes or ())
    return is_part or bool(TENSOR_PARALLEL_RANKS.of(parameter)) or SEQUENCE_PARALLEL.of(parameter)


def check_placement(name: str, parameter: nn.Parameter, tensor: Ranks) -> None:
    """Checks that a layer's marks agree with the ranks that FlatFSDP was given.

    Args:
        name: name of the parameter, for errors.
        parameter: the parameter.
        tensor: the tensor-parallel ranks that FlatFSDP was given.

    Raises:
        ValueError: if a layer has declared the parameter for other ranks, or in a way that fits none of
            these.
    """
    ranks = list(TENSOR_PARALLEL_RANKS.of(parameter))
    if ranks and ranks != tensor.global_ranks:
        given = "no tp_group" if tensor.group is None else f"a tp_group of ranks {tensor.global_ranks}"
        raise ValueError(
            f"ranks {ranks} share the layer of parameter {name}, and FlatFSDP got {given}; pass its tp_group"
        )
    if TENSOR_MODEL_PARALLEL.of(parameter):
        _check_split(name, parameter, tensor)
    elif SEQUENCE_PARALLEL.of(parameter) and tensor.group is None:
        raise ValueError(
            f"the gradient of {name} is summed over tensor-parallel ranks; pass the tp_group of its layer"
        )


def _check_split(name: str, parameter: nn.Parameter, tensor: Ranks) -> None:
    sizes = PARTITION_SIZES.of(parameter)
    if sizes is None and tensor.size == 1:
        # Megatron marks parameters on a single rank, too.
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
        ValueError: if several ranks share a layer that has an unmarked parameter.
    """
    exchanges = EXCHANGES.of(owner) or {}
    if all(exchange.ranks.size == 1 for exchange in exchanges.values()):
        return
    for exchange in exchanges.values():
        # Raises if the ranks are still unknown.
        _ = exchange.ranks.group
    for name, parameter in owner._parameters.items():
        if parameter is not None and not TENSOR_MODEL_PARALLEL.is_on(parameter):
            raise ValueError(
                f"parameter {f'{path}.{name}'.lstrip('.')} is of a layer that several ranks share, and does "
                "not say how; use flatfsdp.contract.tensor_parallel.declare_split or declare_whole"
            )
