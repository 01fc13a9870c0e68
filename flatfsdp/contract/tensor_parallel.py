"""The ranks that share a layer, and the part of each of its parameters that a rank has.

In:   a layer's tp_group, tp_size and sequence_parallel, and the sizes of its whole parameters.
Out:  a `TensorParallel`, and parameters whose attributes say how they are split.
Next: `matmul/exchange.py` communicates; FlatFSDP sums, clips and saves by these attributes.  Their names are
      Transformer Engine's and Megatron's, except partition_sizes and tensor_parallel_ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.ranks import LateRanks, Ranks
from flatfsdp.contract.attribute import Attribute

TENSOR_MODEL_PARALLEL = Attribute[bool]("tensor_model_parallel", False)
"""Whether a parameter is split over the ranks of tp_group at all."""

PARTITION_DIM = Attribute[int]("partition_dim", -1)
"""Dimension along which it is split; -1 for a parameter that is not split."""

PARTITION_SIZES = Attribute[tuple[int, ...] | None]("partition_sizes", None)
"""Sizes of the parts of the whole dimension that are each split evenly, such as (ffn, ffn) for [gate | up];
rank r has the r-th piece of each, one after the other."""

PARTITION_STRIDE = Attribute[int]("partition_stride", 1)
"""Number of such parts."""

SEQUENCE_PARALLEL = Attribute[bool]("sequence_parallel", False)
"""Whether each rank's gradient of a whole parameter is only a part of a sum over the ranks, because each has
seen other tokens, or other heads."""

TENSOR_PARALLEL_RANKS = Attribute[tuple[int, ...]]("tensor_parallel_ranks", ())
"""Ranks that share the layer, by global number; () if the layer does not know them."""

SKIP_BACKWARD_POST_HOOK = Attribute[bool]("skip_backward_post_hook", False)
"""Whether a weight's gradient is computed after the backward."""

_KEPT = {
    attribute.name
    for attribute in (
        TENSOR_MODEL_PARALLEL,
        PARTITION_DIM,
        PARTITION_SIZES,
        PARTITION_STRIDE,
        SEQUENCE_PARALLEL,
        TENSOR_PARALLEL_RANKS,
        SKIP_BACKWARD_POST_HOOK,
    )
}
"""Marks that a replacement of a parameter must carry, too."""


class HasRanks(Protocol):
    """Interface of a linear map's exchange, as far as the engine needs it."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the map."""


EXCHANGES = Attribute[Mapping[str, HasRanks] | None]("exchanges", None)
"""Attribute of a layer: the exchanges between the ranks that share its linear maps, by the weight's name."""

Mode = Literal["column", "row"]
"""Split of a linear map: by its weight's rows, which are columns of the result, or by its columns."""


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism of one layer.

    Attributes:
        ranks: ranks that share the layer; with a size of 1 nothing is split.
        sequence_parallel: whether activations between layers are split along dimension 0, the sequence, too.
        overlap: whether inputs of GEMMs are sent in chunks that are multiplied as they arrive.
    """

    ranks: Ranks
    sequence_parallel: bool = False
    overlap: bool = False

    @staticmethod
    def of(
        layer: str,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        sequence_parallel: bool,
        overlap: bool = False,
    ) -> TensorParallel:
        """Resolves a layer's arguments with Transformer Engine's names.

        Args:
            layer: name of the layer, for errors.
            tp_group: ranks that share the layer; with tp_size alone they are set later, see `Shared`.
            tp_size: size of the group; may be left at 1 if the group is given.
            sequence_parallel: whether activations between layers are split along dimension 0, too.
            overlap: whether inputs of GEMMs are sent in chunks.

        Raises:
            ValueError: if size and group differ, or there is nothing to overlap.
        """
        if tp_size < 1:
            raise ValueError(f"{layer}: tp_size is {tp_size}; it must be at least 1")
        ranks = Ranks.of(tp_group) if tp_group is not None or tp_size == 1 else LateRanks(layer, tp_size)
        if tp_size not in (1, ranks.size):
            raise ValueError(
                f"{layer}: tp_size is {tp_size}, and tp_group has {ranks.size} ranks; leave tp_size out"
            )
        if overlap and ranks.size > 1 and not sequence_parallel:
            raise ValueError(f"{layer}: tp_overlap cuts what sequence_parallel=True sends; set that, too")
        # On one rank there is nothing to split, as in Transformer Engine.
        is_shared = ranks.size > 1
        return TensorParallel(ranks, sequence_parallel and is_shared, overlap and is_shared)

    def share(self, layer: str, what: str, size: int) -> int:
        """Divides `size` by the number of ranks.

        Raises:
            ValueError: if it is not a multiple of that number.
        """
        if size % self.ranks.size:
            raise ValueError(
                f"{layer}: {what} is {size}, which {self.ranks.size} tensor-parallel ranks cannot share"
            )
        return size // self.ranks.size


def declare_split(
    parameter: nn.Parameter, dim: int, sizes: Sequence[int], ranks: Ranks | None = None
) -> None:
    """Marks a parameter that is this rank's part of a split one.

    Args:
        parameter: this rank's part.
        dim: dimension along which the whole is split.
        sizes: sizes of the parts of the whole dimension that are each split evenly, such as (ffn, ffn).
        ranks: ranks that share the layer.
    """
    _declare(parameter, True, dim, sizes, False, ranks)


def declare_whole(parameter: nn.Parameter, *, partial_grad: bool, ranks: Ranks | None = None) -> None:
    """Marks a parameter that every rank has whole.

    Args:
        parameter: the parameter.
        partial_grad: whether its gradients have to be summed over the ranks.
        ranks: ranks that share the layer.
    """
    _declare(parameter, False, -1, (), partial_grad, ranks)


def declare_map(
    parallel: TensorParallel,
    mode: Mode | None,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    sizes: Sequence[int],
) -> None:
    """Marks the parameters of one linear map; does nothing on a single rank.

    Args:
        parallel: tensor parallelism of the layer.
        mode: split of the map; None if it is not split.
        weight: weight of the map.
        bias: its bias, if there is one.
        sizes: sizes of the parts of the whole weight's split dimension.
    """
    if parallel.ranks.size == 1:
        return
    if mode is None:
        declare_whole(weight, partial_grad=parallel.sequence_parallel, ranks=parallel.ranks)
    else:
        declare_split(weight, 0 if mode == "column" else 1, sizes, parallel.ranks)
    if bias is None:
        return
    if mode == "column":
        declare_split(bias, 0, sizes, parallel.ranks)
    else:
        declare_whole(bias, partial_grad=parallel.sequence_parallel, ranks=parallel.ranks)


def declare_norm(parallel: TensorParallel, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Marks the parameters of a norm that each rank applies to its own tokens."""
    declare_map(parallel, None, weight, bias, ())


def _declare(
    parameter: nn.Parameter,
    is_split: bool,
    dim: int,
    sizes: Sequence[int],
    partial: bool,
    ranks: Ranks | None,
) -> None:
    is_said = ranks is not None and ranks.size > 1 and are_known(ranks)
    shared_by = tuple(ranks.global_ranks) if ranks is not None and is_said else ()
    # Set also where it is False: `check_marks` refuses parameters of shared layers that say nothing.
    TENSOR_MODEL_PARALLEL.leave(parameter, is_split)
    PARTITION_DIM.leave(parameter, dim)
    PARTITION_SIZES.leave(parameter, tuple(sizes))
    PARTITION_STRIDE.leave(parameter, max(1, len(sizes)))
    SEQUENCE_PARALLEL.leave(parameter, partial)
    TENSOR_PARALLEL_RANKS.leave(parameter, shared_by)


def marks_of(parameter: nn.Parameter | None) -> dict[str, Any]:
    """Marks that a layer has set on its parameter, by attribute name."""
    attributes = {} if parameter is None else vars(parameter)
    return {key: value for key, value in attributes.items() if key in _KEPT}


def mark_like(parameter: nn.Parameter | None, marks: dict[str, Any]) -> None:
    """Copies marks to a parameter that has none of its own."""
    if parameter is not None and not marks_of(parameter):
        vars(parameter).update(marks)


def are_known(ranks: Ranks) -> bool:
    """Whether the ranks are known, not just their number."""
    return not isinstance(ranks, LateRanks) or ranks.found is not None


def part_of(whole: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """Cuts this rank's part from a whole tensor: its piece of each of the parts of `sizes`."""
    pieces = [part.chunk(ranks.size, dim)[ranks.rank] for part in whole.split(list(sizes), dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
