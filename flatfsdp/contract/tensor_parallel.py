"""Which ranks share a layer, and which part of each of its parameters a rank has.

In:   a layer's tp_group, tp_size and sequence_parallel, and the sizes of its whole parameters.
Out:  a `TensorParallel`, and parameters that say how they are split:

    tensor_model_parallel   whether a parameter is split over the ranks of tp_group at all
    partition_dim           along which dimension; -1 for one that is not split
    partition_sizes         sizes of the parts of the whole dimension that are each split evenly, such as
                            (ffn, ffn) for [gate | up]; rank r has the r-th piece of each, one after the other
    partition_stride        how many they are
    sequence_parallel       whether the gradient of a parameter that all ranks have is a part of a sum over
                            them, because each rank has seen other tokens, or other heads
    tensor_parallel_ranks   the ranks that share the layer, by their global numbers; () if it does not know

Next: `matmul/exchange.py` communicates; FlatFSDP sums, clips and saves by these attributes.  The names are
Transformer Engine's and Megatron's, but for partition_sizes and tensor_parallel_ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.ranks import LateRanks, Ranks

Mode = Literal["column", "row"]
"""How a linear map is split: by its weight's rows, which are columns of the result, or by its columns."""


@dataclass(frozen=True)
class TensorParallel:
    """
    Attributes:
        ranks: that share a layer; with a size of 1 nothing is split.
        sequence_parallel: activations between layers are split along dimension 0, the sequence, too.
        overlap: what products wait for is sent in chunks, which are multiplied as they come.
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
        """
        Args:
            tp_group: without it and with a tp_size, the ranks are found out later; see `Shared`.
            tp_size: of the group; may be left out (1) where the group is given.

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
        """One rank's part of `size`.

        Raises:
            ValueError: if the ranks cannot share it equally.
        """
        if size % self.ranks.size:
            raise ValueError(
                f"{layer}: {what} is {size}, which {self.ranks.size} tensor-parallel ranks cannot share "
                "equally; choose a multiple, or fewer ranks"
            )
        return size // self.ranks.size


def declare_split(
    parameter: nn.Parameter, dim: int, sizes: Sequence[int], ranks: Ranks | None = None
) -> None:
    """Marks a rank's part of a parameter.

    Args:
        sizes: of the parts of the whole dimension; see above.
        ranks: that share the layer.
    """
    _declare(parameter, True, dim, tuple(sizes), False, ranks)


def declare_whole(parameter: nn.Parameter, *, partial_grad: bool, ranks: Ranks | None = None) -> None:
    """Marks a parameter that every rank has.

    Args:
        partial_grad: whether its gradients have to be summed over the ranks.
        ranks: that share the layer.
    """
    _declare(parameter, False, -1, (), partial_grad, ranks)


def declare_map(
    parallel: TensorParallel,
    mode: Mode | None,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    sizes: Sequence[int],
) -> None:
    """Marks the parameters of one linear map; of one rank alone nothing is said.

    Args:
        sizes: of the parts of the split dimension of the whole weight.
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
    """Marks the parameters of a norm, which each rank applies to the tokens that it has."""
    declare_map(parallel, None, weight, bias, ())


def _declare(
    parameter: nn.Parameter,
    is_split: bool,
    dim: int,
    sizes: tuple[int, ...],
    partial_grad: bool,
    ranks: Ranks | None,
) -> None:
    is_said = ranks is not None and ranks.size > 1 and are_known(ranks)
    shared_by = tuple(ranks.global_ranks) if ranks is not None and is_said else ()
    values = (is_split, dim, sizes, max(1, len(sizes)), partial_grad, shared_by)
    vars(parameter).update(zip(_MARKS, values, strict=True))


_MARKS = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_sizes",
    "partition_stride",
    "sequence_parallel",
    "tensor_parallel_ranks",
)


_DELAYED = "skip_backward_post_hook"


_KEPT = (*_MARKS, _DELAYED)
"""What a parameter in another's place is marked with, too."""


def declare_delayed(weight: nn.Parameter) -> None:
    """Marks a weight whose gradient comes after the backward, in Transformer Engine's words."""
    setattr(weight, _DELAYED, True)


def is_delayed(weight: Tensor) -> bool:
    """Whether a layer, of any library, has said so."""
    return getattr(weight, _DELAYED, False)


def marks_of(parameter: nn.Parameter | None) -> dict[str, Any]:
    attributes = {} if parameter is None else vars(parameter)
    return {key: value for key, value in attributes.items() if key in _KEPT}


def mark_like(parameter: nn.Parameter | None, marks: dict[str, Any]) -> None:
    """Marks a parameter that has no marks of its own."""
    if parameter is not None and not marks_of(parameter):
        vars(parameter).update(marks)


def are_known(ranks: Ranks) -> bool:
    """Whether it has been said which they are."""
    return not isinstance(ranks, LateRanks) or ranks.found is not None


def part_of(whole: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """This rank's part of a whole tensor: its piece of each of the parts of `sizes`."""
    pieces = [part.chunk(ranks.size, dim)[ranks.rank] for part in whole.split(list(sizes), dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
