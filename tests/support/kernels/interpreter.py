"""Repairs Triton 3.6's interpreter, which rounds casts wrongly and multiplies bf16 matrices as integers.

As it comes, casts to bf16 truncate, casts to FP8 lose the carry of the mantissa, NaN and infinity become
finite, and `tl.dot` of bf16 uses the raw bits.  With numpy 2.4, loops over tensors fail, too.  Reductions
with functions of our own take seconds, as they go through tensors number by number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_unrepaired = interpreter._patch_lang_tensor

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def repair() -> None:
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.ReduceOps.generic_reduce = _generic_reduce


def _tensor(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    raw = np.ascontiguousarray(data).view(np.uint8)
    return torch.from_numpy(raw.copy()).view(_DTYPES[str(dtype)]).reshape(data.shape)


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: Any) -> np.ndarray:
    """Rounds to nearest even, as the hardware does; FP8 saturates and keeps NaN."""
    values, dtype = _tensor(data, source), _DTYPES[str(target)]
    if target.primitive_bitwidth == 8:
        largest = torch.finfo(dtype).max
        values = values.float().clamp(-largest, largest)
    converted = values.to(dtype).contiguous()
    width = getattr(np, f"uint{target.primitive_bitwidth}")
    return converted.view(torch.uint8).numpy().view(width).reshape(data.shape)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Bounds of loops are scalars, held as arrays of one element, which numpy 2.4 no longer converts."""
    _patch_unrepaired(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _create_dot(
    _builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any
) -> interpreter.TensorHandle:
    """Products in FP32, added to an accumulator of whatever dtype it has."""
    left, right = (_tensor(x.data, x.dtype).float().numpy() for x in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _generic_reduce(reduction: Any, inputs: tuple[Any]) -> list[Any]:
    """Reduces one tensor along one axis, whole slices at a time."""
    (tensor,) = inputs
    slices = np.moveaxis(tensor.handle.data, reduction.axis, 0)
    total, *others = (reduction.to_tensor(part, tensor.dtype) for part in slices)
    for part in others:
        total = reduction.combine_fn.fn(total, part)
    return [total]
