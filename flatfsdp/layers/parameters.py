"""What the constructors of all layers have in common: new parameters, initial values, parallel options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

InitMethod = Callable[[Tensor], Any]
"""Fills a weight in place."""


def normal_init(weight: Tensor) -> None:
    """Transformer Engine's default: normal, standard deviation 0.023."""
    weight.normal_(0.0, 0.023)


def new_parameter(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Uninitialised, in the default dtype and on the default device where None."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


def require_no_tensor_parallelism(
    layer: str,
    *,
    tp_group: dist.ProcessGroup | None,
    tp_size: int,
    sequence_parallel: bool,
) -> None:
    """
    Raises:
        NotImplementedError: if a layer is to be split over ranks.
    """
    size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
    if size != 1 or sequence_parallel:
        raise NotImplementedError(
            f"{layer}: tensor parallelism (tp_size={size}, sequence_parallel={sequence_parallel}) comes with "
            "flatfsdp.parallel; until then leave tp_group, tp_size and sequence_parallel at their defaults"
        )
