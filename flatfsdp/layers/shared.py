"""Layers shared by tensor-parallel ranks: their group, parameters with marks, and initial values.

In:   a layer's `TensorParallel`, and the marks of its parameters (`contract/tensor_parallel.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.ranks import ALONE, LateRanks, Ranks
from flatfsdp.contract.tensor_parallel import (
    PARTITION_DIM,
    PARTITION_SIZES,
    TENSOR_MODEL_PARALLEL,
    TENSOR_PARALLEL_RANKS,
    TensorParallel,
    are_known,
    mark_like,
    marks_of,
    part_of,
)

InitMethod = Callable[[Tensor], Any]
"""Fills a weight in place."""


def normal_init(weight: Tensor) -> None:
    """Fills a weight with Transformer Engine's default: normal, standard deviation 0.023."""
    weight.normal_(0.0, 0.023)


def new_parameter(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Makes an uninitialised parameter; None means torch's default dtype or device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


class Shared(nn.Module):
    """A layer that tensor-parallel ranks may share, or that contains such layers."""

    _parallel = TensorParallel(ALONE)

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Sets the tensor-parallel group of a layer that was made with a tp_size and without a tp_group.

        Initialises its weights, which were NaN, unless they have been loaded.  Call it before the layer is
        used or wrapped, in the same order on all ranks.  It applies to the inner layers, too.

        Args:
            tp_group: the tensor-parallel ranks; None is a single rank.

        Raises:
            ValueError: if the group's size is not tp_size, or the layer already has another group.
        """
        ranks = Ranks.of(tp_group)
        layers = [layer for layer in self.modules() if isinstance(layer, Shared)]
        split = [layer for layer in layers if layer._parallel.ranks.size > 1]
        if ranks.size > 1 and not split:
            raise ValueError(
                f"{type(self).__name__} was made for one rank, and the group has {ranks.size}; pass "
                f"tp_size={ranks.size} to the constructor"
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
            raise ValueError(f"{name}: ranks {known.global_ranks} share it already, not {ranks.global_ranks}")

    def _set_ranks(self, ranks: Ranks) -> None:
        late = self._parallel.ranks
        if not isinstance(late, LateRanks) or late.found is not None:
            return
        late.find(ranks)
        split = [p for p in self._parameters.values() if p is not None and TENSOR_MODEL_PARALLEL.of(p)]
        for parameter in self._parameters.values():
            if parameter is not None and marks_of(parameter):
                TENSOR_PARALLEL_RANKS.leave(parameter, tuple(ranks.global_ranks))
        if any(p is not None and not p.is_meta and bool(p.isnan().any()) for p in split):
            self.reset_parameters()  # type: ignore[operator]


class Declaring(Shared):
    """A layer whose marks on parameters survive when a parameter is replaced.

    Parameters are replaced when memory is allocated (`to_empty`), loaded (`load_state_dict(assign=True)`),
    assigned or copied, and PyTorch drops their attributes then.  Without the marks FlatFSDP would treat the
    parts on several ranks as one parameter.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Marks the new parameter like its predecessor; assigning a parameter calls this, too."""
        before = self._parameters.get(name)
        super().register_parameter(name, param)
        mark_like(param, marks_of(before))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Declaring:
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, parameter in self._parameters.items():
            mark_like(parameter, marks_of(before[name]))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state with the parameters' marks, because copies of parameters lose their attributes."""
        marks = {name: marks_of(parameter) for name, parameter in self._parameters.items()}
        return {**self.__dict__, "_marks": marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("_marks", {})
        super().__setstate__(state)
        for name, parameter in self._parameters.items():
            mark_like(parameter, marks.get(name, {}))


@torch.no_grad()
def initialize(parameter: nn.Parameter, init_method: Callable[[Tensor], Any], ranks: Ranks) -> None:
    """Fills a rank's part of a parameter with the values that one process would draw.

    Every rank draws the whole tensor from the default generator and keeps its part.  So neither the model nor
    later random numbers depend on the number of ranks.  Seed all ranks alike.
    """
    if not TENSOR_MODEL_PARALLEL.of(parameter) or ranks.size == 1:
        init_method(parameter)
        return
    if not are_known(ranks):
        parameter.fill_(math.nan)
        return
    dim, sizes = PARTITION_DIM.of(parameter), PARTITION_SIZES.of(parameter) or ()
    shape = list(parameter.shape)
    shape[dim] = sum(sizes)
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    init_method(whole)
    parameter.copy_(part_of(whole, dim, sizes, ranks))
