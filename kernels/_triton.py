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


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


__all__ = ["cdiv", "jit", "on_device_of", "tl", "triton"]
