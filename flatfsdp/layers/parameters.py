"""What the constructors of all layers have in common: new parameters and initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], Any]
"""Fills a weight in place."""


def normal_init(weight: Tensor) -> None:
    """Transformer Engine's default: normal, standard deviation 0.023."""
    weight.normal_(0.0, 0.023)


def new_parameter(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Uninitialised, in the default dtype and on the default device where None."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
