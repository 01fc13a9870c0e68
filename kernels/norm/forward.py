"""LayerNorm and RMSNorm, with the addition of a residual before and the cast to FP8 after, in one kernel.

        summed = x + residual                          rounded to x's dtype: what later layers, and the norm,
        see
    mean = sum(summed) / n                         LayerNorm; RMSNorm subtracts nothing
    rstd = 1 / sqrt(sum((summed - mean)^2) / n + eps)
        y = (summed - mean) * rstd * weight + bias     1 + weight instead of weight if `zero_centered`

LayerNorm is by Ba et al. (2016), RMSNorm by Zhang and Sennrich (2019); `zero_centered` is Transformer
Engine's `zero_centered_gamma`.  Statistics are FP32, by two passes over a row or by merged blocks (Chan et
al., 1979), so that a large mean costs no digits.

Bytes per element of p bytes: p read, 2 p more with a residual, p written in high precision, 1 for each FP8
form.

`rows.py` has the kernel for whole rows, `transposed.py` one for many rows that are also transposed, and
`wide.py` one for rows too wide for registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.norm import rows as norm_rows
from flatfsdp.kernels.norm import transposed as norm_transposed
from flatfsdp.kernels.norm import wide as norm_wide
from flatfsdp.kernels.norm.tensors import NormTensors
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import (
    HIGH_DTYPES,
    allocate_outputs,
    check_input,
    check_like,
    write_outputs,
)

WIDEST_ROW = 16384
"""Largest number of columns that a program keeps in registers."""


class NormForward(NamedTuple):
    """Results of `norm_forward`; None where not requested."""

    out: Tensor | None
    rowwise: Tensor | None
    columnwise: Tensor | None
    summed: Tensor
    mean: Tensor | None
    rstd: Tensor


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    value = x.float()
    if residual is not None and summed is not None:
        value = summed.copy_(value + residual.float()).float()
    if mean is not None:
        mean.copy_(value.mean(1))
        value = value - mean[:, None]
    rstd.copy_(1 / torch.sqrt(value.square().mean(1) + eps))
    gain = weight.float() + 1 if zero_centered else weight.float()
    value = value * rstd[:, None] * gain
    if bias is not None:
        value = value + bias.float()
    write_outputs(value, out, rowwise, columnwise, scale, amax)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> None:
    tensors = NormTensors(
        *(x, residual, weight, bias, summed, mean, rstd, out, rowwise, columnwise, scale, amax)
    )
    if norm_transposed.fits(tensors):
        norm_transposed.launch(tensors, eps, zero_centered)
    elif x.shape[1] > WIDEST_ROW:
        norm_wide.launch(tensors, eps, zero_centered)
    else:
        norm_rows.launch(tensors, eps, zero_centered)


_norm_forward = operator(
    "norm_forward_(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor(a!)? summed, "
    "Tensor(b!)? mean, Tensor(c!) rstd, Tensor(d!)? out, Tensor(e!)? rowwise, Tensor(f!)? columnwise, "
    "Tensor? scale, Tensor(g!)? amax, float eps, bool zero_centered) -> ()",
    reference=reference,
    launch=launch,
)


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    high_precision: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
) -> NormForward:
    """Normalize the rows of x, or of x + residual.

    Args:
        x: [rows, cols], FP32, FP16 or bf16, contiguous.
        weight: [cols] in any of these dtypes.
        bias: like `weight`, or None.
        eps: added to the variance or mean square.
        rms: RMSNorm, which has no bias, instead of LayerNorm.
        zero_centered: the gain is 1 + weight.
        residual: added to x first; of x's shape and dtype, contiguous.
        scale: FP32, one element: multiplies values before the cast to FP8.
        amax: FP32, one element: raised to max |y| of the FP32 result before scaling.
        dtype: float8_e4m3fn or float8_e5m2, the dtype of the FP8 outputs.
        high_precision: whether to return y in x's dtype.
        rowwise: whether to return y in FP8; ignored without `dtype`.
        columnwise: whether to return y transposed in FP8.

    Returns:
        `out` [rows, cols] in x's dtype, `rowwise` [rows, cols] and `columnwise` [cols, rows] in FP8; `summed`
        in x's dtype (x itself without a residual); `mean` (None if `rms`) and `rstd`, FP32 [rows].

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    rows, cols = x.shape
    if rms and bias is not None:
        raise ValueError("RMSNorm has no bias: pass bias=None, or rms=False for LayerNorm")
    if residual is not None:
        check_like("residual", residual, x, (rows, cols), x.dtype)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_like(name, tensor, x, (cols,), tensor.dtype if tensor.dtype in HIGH_DTYPES else x.dtype)
    outputs = allocate_outputs(
        x,
        cols,
        scale=scale,
        amax=amax,
        dtype=dtype,
        high_precision=high_precision,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    summed = None if residual is None else torch.empty_like(x)
    mean = None if rms else x.new_empty(rows, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    _norm_forward(
        x, residual, weight, bias, summed, mean, rstd, *outputs, scale, amax, eps, zero_centered
    )  # fmt: skip
    if summed is None:
        summed = x
    return NormForward(outputs.out, outputs.rowwise, outputs.columnwise, summed, mean, rstd)
