"""Turns a layer's input into the matrix that its first GEMM or norm reads.

In:   [..., features], in FP32, fp16 or bf16.
Out:  [tokens, features], contiguous, in the dtype of the activations.
Next: `calls.py` begins a call with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Activation dtypes that layers accept."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that torch.autocast casts to; None if it is off or does not know the device (meta)."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def activation_dtype(x: Tensor, layer: nn.Module, weight: Tensor) -> torch.dtype:
    """The dtype of a layer's input after torch.autocast, if that is on.

    Raises:
        TypeError: if GEMMs do not support the dtype, or it is not the weight's and torch.autocast is off.
    """
    cast_to = autocast_dtype(x.device.type)
    if cast_to is not None:
        return cast_to
    if x.dtype != weight.dtype or x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{type(layer).__name__}: the input is {x.dtype}, the weight {weight.dtype}; outside of "
            "torch.autocast both have to be FP32, fp16 or bf16 alike (params_dtype, or layer.to(dtype))"
        )
    return x.dtype


def as_matrix(inp: Tensor, features: int, dtype: torch.dtype, layer: nn.Module) -> Tensor:
    """Makes [..., features] a contiguous [tokens, features] in `dtype`.

    Raises:
        ValueError: if the last dimension has another size.
    """
    if inp.dim() == 0 or inp.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the last dimension of {tuple(inp.shape)} has to be {features}"
        )
    if inp.dtype is not dtype:
        inp = inp.to(dtype)
    if inp.dim() != 2:
        # Without tokens, a -1 would be ambiguous.
        inp = inp.reshape(inp.numel() // features, features)
    return inp.contiguous()


def residual_matrix(
    residual: Tensor | None, inp: Tensor, dtype: torch.dtype, layer: nn.Module
) -> Tensor | None:
    """Makes the residual that is added to `inp` a matrix, like `as_matrix`.

    Raises:
        ValueError: if the two shapes differ.
    """
    if residual is None:
        return None
    if residual.shape != inp.shape:
        raise ValueError(
            f"{type(layer).__name__}: the residual has shape {tuple(residual.shape)}, not {tuple(inp.shape)}"
        )
    if residual.is_leaf and residual.requires_grad:
        # Both addends get the same gradient tensor.  Autograd stores it in a leaf's .grad without a copy if
        # it comes through a view, and a second backward would then add to both.
        residual = residual * 1
    return as_matrix(residual, inp.shape[-1], dtype, layer)
