"""Separates whole tensors that share a storage without being tied.

In:   a state dict whose tensors are slices of gathered flat buffers.
Out:  tensors that share memory only if they are the same parameter.

Accelerate takes tensors with a common storage for tied weights: it writes one of them, and logs that it left
out the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gives each tensor that is a slice of a larger storage its own; tied ones keep a common one."""
    found = dict(state)
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.detach().clone(memory_format=torch.contiguous_format)
            found[name] = copies[place]
    return found
