"""New parameters and initial values, for the constructors of all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], Any]
"""Fills a weight in place."""


def normal_init(weight: Tensor) -> None:
    """Fills a weight with Transformer Engine's default: normal, standard deviation 0.023."""
    weight.normal_(0.0, 0.023)


def new_parameter(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """Makes an uninitialised parameter; None means torch's default dtype or device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
