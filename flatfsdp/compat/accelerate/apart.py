"""Whole tensors that Accelerate does not take for one.

In:   a state dict, whose tensors are places in the flat buffers that were gathered.
Out:  tensors that share memory only where they are the same parameter.

Accelerate writes one of several tensors that share a storage, and says in the log that it has left out the
others: it takes them for tied weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor that is a part of its storage gets one of its own; tied ones have one together."""
    found = dict(state)
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.detach().clone(memory_format=torch.contiguous_format)
            found[name] = copies[place]
    return found
