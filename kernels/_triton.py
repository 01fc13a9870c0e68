"""Triton, or a stand-in with which kernels can be defined, but not run, where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Callable[[Callable[..., Any]], Any] = triton.jit
except ImportError:  # a machine without a GPU
    triton = tl = None

    def jit(fn: Callable[..., Any]) -> Any:
        return fn


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches inside go to the tensor's device; the interpreter runs kernels on CPU tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


TRITON_NAMES = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}
"""Where Triton's name for a dtype is not torch's."""


def triton_dtype(dtype: torch.dtype | None) -> Any:
    """Kernels see the dtypes of arguments, but not of what lies behind addresses in a table."""
    return None if dtype is None else getattr(tl, TRITON_NAMES.get(dtype, str(dtype).removeprefix("torch.")))


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


__all__ = ["cdiv", "jit", "on_device_of", "tl", "triton", "triton_dtype"]
