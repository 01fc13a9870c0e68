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

Next: `exchange.py` communicates; FlatFSDP sums, clips and saves by these attributes.  The names are
Transformer Engine's and Megatron's, but for partition_sizes and tensor_parallel_ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm import ALONE, Ranks

Mode = Literal["column", "row"]
"""How a linear map is split: by its weight's rows, which are columns of the result, or by its columns."""


class LateRanks(Ranks):
    """Ranks of which only the number is known, until a layer is given their group.

    Raises:
        RuntimeError: where group or rank are asked for before.
    """

    def __init__(self, layer: str, size: int) -> None:
        vars(self).update(size=size, _layer=layer, _found=None)

    @property
    def found(self) -> Ranks | None:
        found: Ranks | None = vars(self)["_found"]
        return found

    @property
    def _group(self) -> ReferenceType[dist.ProcessGroup] | None:
        return self._required()._group

    @property
    def rank(self) -> int:
        return self._required().rank

    def _required(self) -> Ranks:
        if self.found is None:
            raise RuntimeError(
                f"{vars(self)['_layer']}: tp_size is {self.size}, and nobody has said which ranks these are; "
                "call set_tensor_parallel_group(tp_group) first, or pass tp_group to the constructor"
            )
        return self.found

    def find(self, ranks: Ranks) -> None:
        vars(self)["_found"] = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> LateRanks:
        """Of a layer whose copy is told by itself."""
        other = memo[id(self)] = LateRanks(vars(self)["_layer"], self.size)
        vars(other).update(vars(self))
        return other


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


class Shared(nn.Module):
    """A layer that several ranks may share, or that has such layers inside."""

    _parallel = TensorParallel(ALONE)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Says which ranks share a layer that was made with a tp_size and without a tp_group, as in
        Transformer Engine, and initialises its weights, which were NaN, unless they have been loaded.

        Call it before the layer is used or wrapped, in the same order on all ranks.  The layers inside are
        told, too.

        Raises:
            ValueError: if the group has another size than tp_size, or the layer has another group.
        """
        ranks = Ranks.of(tp_group)
        layers = [layer for layer in self.modules() if isinstance(layer, Shared)]
        split = [layer for layer in layers if layer._parallel.ranks.size > 1]
        if ranks.size > 1 and not split:
            raise ValueError(
                f"{type(self).__name__}: tp_group has {ranks.size} ranks, and the layer was made whole, for "
                f"one; pass tp_size={ranks.size} to the constructor"
            )
        for layer in split:
            layer._check_group(ranks)
        for layer in split:
            layer._set_ranks(ranks)

    def _check_group(self, ranks: Ranks) -> None:
        own, name = self._parallel.ranks, type(self).__name__
        if own.size != ranks.size:
            raise ValueError(
                f"{name}: tp_size is {own.size}, and tp_group has {ranks.size} ranks; make both the same"
            )
        known = own.found if isinstance(own, LateRanks) else own
        if known is not None and known.global_ranks != ranks.global_ranks:
            raise ValueError(
                f"{name}: ranks {known.global_ranks} share it already, so {ranks.global_ranks} cannot"
            )

    def _set_ranks(self, ranks: Ranks) -> None:
        late = self._parallel.ranks
        if not isinstance(late, LateRanks) or late.found is not None:
            return
        late.find(ranks)
        split = [p for p in self._parameters.values() if getattr(p, "tensor_model_parallel", False)]
        for parameter in self._parameters.values():
            if parameter is not None and _marks_of(parameter):
                vars(parameter)["tensor_parallel_ranks"] = tuple(ranks.global_ranks)
        if any(p is not None and not p.is_meta and bool(p.isnan().any()) for p in split):
            self.reset_parameters()  # type: ignore[operator]


class Declaring(Shared):
    """A layer whose parameters stay marked when others take their place.

    Others come with memory (`to_empty`), are loaded (`load_state_dict(assign=True)`), assigned or copied, and
    PyTorch drops attributes then.  FlatFSDP would take the parts of several ranks for one parameter.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module; assigning a parameter calls it, too."""
        before = self._parameters.get(name)
        super().register_parameter(name, param)
        _mark_like(param, _marks_of(before))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Declaring:
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, parameter in self._parameters.items():
            _mark_like(parameter, _marks_of(before[name]))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies of parameters have no attributes."""
        marks = {name: _marks_of(parameter) for name, parameter in self._parameters.items()}
        return {**self.__dict__, "_marks": marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("_marks", {})
        super().__setstate__(state)
        for name, parameter in self._parameters.items():
            _mark_like(parameter, marks.get(name, {}))


def _marks_of(parameter: nn.Parameter | None) -> dict[str, Any]:
    attributes = {} if parameter is None else vars(parameter)
    return {key: value for key, value in attributes.items() if key in _KEPT}


def _mark_like(parameter: nn.Parameter | None, marks: dict[str, Any]) -> None:
    """Marks a parameter that has no marks of its own."""
    if parameter is not None and not _marks_of(parameter):
        vars(parameter).update(marks)


def are_known(ranks: Ranks) -> bool:
    """Whether it has been said which they are."""
    return not isinstance(ranks, LateRanks) or ranks.found is not None


def part_of(whole: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks) -> Tensor:
    """This rank's part of a whole tensor: its piece of each of the parts of `sizes`."""
    pieces = [part.chunk(ranks.size, dim)[ranks.rank] for part in whole.split(list(sizes), dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@torch.no_grad()
def initialize(parameter: nn.Parameter, init_method: Callable[[Tensor], Any], ranks: Ranks) -> None:
    """Fills a rank's part with what one process would have there.

    Every rank draws the whole tensor from the default generator and keeps its part, so that neither the model
    nor what is drawn next depends on the number of ranks.  Seed all ranks alike.
    """
    if not getattr(parameter, "tensor_model_parallel", False) or ranks.size == 1:
        init_method(parameter)
        return
    if not are_known(ranks):
        parameter.fill_(math.nan)
        return
    dim, sizes = parameter.partition_dim, parameter.partition_sizes  # type: ignore[attr-defined]
    shape = list(parameter.shape)
    shape[dim] = sum(sizes)
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    init_method(whole)
    parameter.copy_(part_of(whole, dim, sizes, ranks))
