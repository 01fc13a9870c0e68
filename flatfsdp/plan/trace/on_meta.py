"""Moves a model that was built elsewhere to the meta device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)
META = torch.device("meta")


def move_to_meta(model: nn.Module) -> None:
    """Replaces parameters and buffers by tensors without memory; those that are shared stay shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    moved.setdefault(id(tensor), _without_memory(tensor))
                    tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


def _without_memory(tensor: T) -> T:
    """Copies a tensor to the meta device, with the attributes that modules have set on a parameter."""
    bare = tensor.detach().to(META)
    if not isinstance(tensor, nn.Parameter):
        return bare  # type: ignore[return-value]
    parameter = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter  # type: ignore[return-value]
