"""Functions that PyTorch computes in another way on the meta device than on a GPU.

In:   calls of PyTorch's functions on tensors of the meta device.
Out:  the operators that a GPU would run, with what they keep for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, library

from flatfsdp.plan.trace.attention import fused_attention


def _fused_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Keeps a mask of one byte an element; elsewhere PyTorch keeps one of the input's dtype."""
    out, _ = torch.native_dropout(input, p, train)
    return out


def _fused_dropout_(input: Tensor, p: float, train: bool) -> Tensor:
    return input.copy_(_fused_dropout(input, p, train))


@contextmanager
def gpu_functions() -> Iterator[None]:
    """Context in which tensors on the meta device are computed as on a GPU.

    PyTorch's dispatcher does it, and not a mode of Python's, which would see every attribute of a tensor.
    """
    overrides = library.Library("aten", "IMPL")
    try:
        overrides.impl("scaled_dot_product_attention", fused_attention, "AutogradMeta")
        overrides.impl("dropout", _fused_dropout, "AutogradMeta")
        overrides.impl("dropout_", _fused_dropout_, "AutogradMeta")
        yield
    finally:
        overrides._destroy()
