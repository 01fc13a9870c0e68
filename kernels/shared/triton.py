"""Triton, or a stand-in for machines without it, with which kernels can be defined but not run.

Gluon is Triton's language of explicit layouts and shared memory: `gluon_jit`, `gl`, `async_copy`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    jit: Callable[[Callable[..., Any]], Any] = triton.jit
    gluon_jit: Callable[[Callable[..., Any]], Any] = gluon.jit
except ImportError:  # a machine without a GPU
    triton = tl = gl = async_copy = None

    def jit(fn: Callable[..., Any]) -> Any:
        return fn

    gluon_jit = jit


def is_here(tensor: Tensor) -> bool:
    """Whether launches go to the tensor's device now; always true of the interpreter's CPU tensors."""
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which launches go to the tensor's device; does nothing for the interpreter's CPU tensors."""
    return nullcontext() if is_here(tensor) else torch.cuda.device(tensor.device)


POINTER_ALIGNMENT = 16
"""Bytes; Triton compiles another variant for an argument whose address is not a multiple of it."""


class Variant(NamedTuple):
    """One compiled variant of a kernel, and what starts it.

    A start is `launch(*grid, stream, *between, *arguments)`, or `(.., *between, arguments)` if `is_packed`.
    """

    compiled: Any
    launch: Callable[..., None]
    between: tuple[Any, ...]
    is_packed: bool


def variant_of(compiled: Any) -> Variant:
    """Finds what `compiled.run` calls in the end.

    Triton's launcher for Nvidia asks in each call who allocates the kernel's scratch memory, although almost
    no kernel has any.  Of launchers that are not known `compiled.run` itself is taken.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = (None, None, None)
    kind = type(run)
    is_known = (kind.__module__, kind.__name__) == ("triton.backends.nvidia.driver", "CudaLauncher")
    if not is_known or run.global_scratch_size or run.profile_scratch_size:
        return Variant(compiled, run, (function, metadata, *no_hooks), False)
    no_scratch = (None, None)
    options = (function, run.launch_cooperative_grid, run.launch_pdl)
    if not hasattr(run, "kernel_signature"):  # Triton 3.6
        return Variant(compiled, run.launch, (*options, *no_scratch, metadata, *no_hooks), False)
    if getattr(run, "gsan_enabled", False):
        return Variant(compiled, run, (function, metadata, *no_hooks), False)
    described = (run.arg_annotations, run.kernel_signature)
    return Variant(compiled, run.launch, (*options, metadata, *no_hooks, *no_scratch, *described), True)


class PreparedKernel:
    """A kernel with fixed grid, numbers and options; a call starts it with tensors.

    Triton inspects every argument of every call to find the compiled variant, which takes twice as long as
    the launch itself.  Here numbers are the same in all calls, and only dtypes and addresses of tensors are
    inspected.

    Args:
        kernel: a @jit kernel that takes tensors (or None) first, and then numbers.
        grid: number of programs in each of one to three dimensions.
        numbers: all other arguments in their order: sizes, scalars, constexprs.
        options: launch options, such as num_warps.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **options: Any) -> None:
        self._grid = (*grid, 1, 1)[:3]
        self._kernel = kernel
        self._numbers = numbers
        self._options = options
        self._variants: dict[tuple[Any, ...], Variant] = {}
        self._hooks = triton.knobs.runtime

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        """Start it on the device of `first`, where all tensors are, in the current stream."""
        if not first.is_cuda:
            self._find_and_start(first, *others)
            return
        device = first.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(first, *others)
            return
        tensors = (first, *others)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        variant = (device, *[None if tensor is None else tensor.dtype for tensor in tensors])
        if reduce(or_, addresses) % POINTER_ALIGNMENT:
            variant = (*variant, *[address % POINTER_ALIGNMENT == 0 for address in addresses])
        found = self._variants.get(variant)
        if found is None:
            compiled = self._find_and_start(*tensors)
            if compiled is not None:
                self._variants[variant] = variant_of(compiled)
            return
        compiled, launch, between, is_packed = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        before, after = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            # A profiler of Triton's launches.
            compiled[self._grid](*addresses, *self._numbers, stream=stream)
            return
        # What that does, but for metadata that hooks would read, and calls of chains without any.
        if is_packed:
            launch(*self._grid, stream, *between, (*addresses, *self._numbers))
        else:
            launch(*self._grid, stream, *between, *addresses, *self._numbers)

    def _find_and_start(self, *tensors: Tensor | None) -> Any:
        """Let Triton start it; returns what Triton has compiled, and None in the interpreter."""
        return self._kernel[self._grid](*tensors, *self._numbers, **self._options)


for_each_shape = lru_cache(maxsize=4096)
"""Decorator that keeps what a function makes of sizes and a tile, such as a `PreparedKernel`.

The tile has to be an argument, looked up in every call: benchmarks/tune.py changes the table.
"""


TRITON_NAMES = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}
"""Triton's names for the dtypes that torch calls otherwise."""


def triton_dtype(dtype: torch.dtype | None) -> Any:
    """Triton's dtype, as a constexpr: kernels see dtypes of arguments, but not of what a table points to."""
    return None if dtype is None else getattr(tl, TRITON_NAMES.get(dtype, str(dtype).removeprefix("torch.")))


def cdiv(value: int, divisor: int) -> int:
    """The quotient, rounded up: host code's `tl.cdiv`."""
    return -(-value // divisor)


__all__ = [
    "PreparedKernel",
    "async_copy",
    "cdiv",
    "for_each_shape",
    "gl",
    "gluon_jit",
    "is_here",
    "jit",
    "on_device_of",
    "tl",
    "triton",
    "triton_dtype",
]
