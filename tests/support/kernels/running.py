"""What tests of all kernels need: both implementations, memory full of garbage, and FP8 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.utils._pytree import tree_leaves

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])
INPUTS = pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def both(reference: Callable[..., None], launch: Callable[..., None]) -> pytest.MarkDecorator:
    """Runs a test with the reference and with the kernel, which it gets as `run`."""
    return pytest.mark.parametrize("run", [reference, launch], ids=["reference", "kernel"])


def garbage(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory full of NaN, on the device of `like`."""
    return torch.full(shape, torch.nan, device=like.device).to(dtype)


def bits(q: Tensor) -> Tensor:
    return q.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def saturated(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast to FP8 that saturates."""
    largest = torch.finfo(dtype).max
    return exact.clamp(-largest, largest).to(dtype)


def check_layouts(expected: Tensor, rowwise: Tensor, columnwise: Tensor | None) -> None:
    """The same numbers as `expected`, and NaN in the same places; `columnwise` is transposed."""
    layouts = {"rowwise": rowwise} if columnwise is None else {"rowwise": rowwise, "columnwise": columnwise.T}
    for layout, found in layouts.items():
        torch.testing.assert_close(
            found.float(),
            expected.float(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, of=layout: f"{of}: {m}",
        )


def check_operator(name: str, *arguments: Any) -> None:
    """Checks that compiled and faked calls of one of our operators go through it."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    leaves = tree_leaves(arguments)
    if any(isinstance(leaf, Tensor) and leaf.dtype in (E4M3, E5M2) for leaf in leaves):
        # Its comparison of arguments has no arithmetic for FP8.
        tests.remove("test_schema")
    library.opcheck(getattr(torch.ops.flatfsdp, name).default, arguments, test_utils=tests)
