"""Activation functions and their gradients, with the cast to FP8, the transpose and fc1's bias gradient.

    gelu    x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is the tanh form 0.5 x (1 + tanh(...))
    qgelu   x * sigmoid(1.702 x)
    silu    x * sigmoid(x)
    relu    max(x, 0)
    srelu   max(x, 0)^2
    geglu, qgeglu, swiglu, reglu, sreglu    f(a) * b with f = gelu, qgelu, silu, relu, srelu, and x = [a | b],
            Transformer Engine's order
    glu     sigmoid(a) * b

The gradient is dy * f'(x); for x = [a | b] it is [dy * b * f'(a) | dy * f(a)].  Gelu by Hendrycks and Gimpel
(2016), gated forms by Shazeer (2020), srelu by So et al. (2021).

Bytes per element of y, with p bytes per element and g = 2 for gated functions, else 1:
    forward   g p read; p written in high precision, 1 for each FP8 form
    backward  (1 + g) p read; g p written in high precision, g for each FP8 form; column sums add little

Constexprs shared by the kernels of this file:

    KIND                    f, a key of `SIGMOID_SLOPE`, or "gelu", "sigmoid", "relu", "srelu"
    IS_GATED                x is [a | b]
    SLOPE_OF_INNER, CUBIC   2 sqrt(2/pi) and 0.044715 of gelu
    WHOLE                   rows are a multiple of WHOLE_ROWS: write the transpose in wide stores
    PAIRS, BLOCK_COLS       half the rows of a tile, and its columns in dy or y
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import (
    Outputs,
    allocate_outputs,
    check_input,
    check_like,
    fold,
    new_bands,
    record_amax,
    rows_at_once,
    sum_bands,
    vector_of,
    write_outputs,
)
from flatfsdp.kernels.shared.pairs import WHOLE_ROWS, larger_magnitude, load_row_pairs, store_pairs
from flatfsdp.kernels.shared.tiles import Tile, find
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "swiglu": "silu",
    "reglu": "relu",
    "sreglu": "srelu",
    "glu": "sigmoid",
}
NAMES = ("gelu", "qgelu", "silu", "relu", "srelu", *GATED)
TWO_ROOT_TWO_OVER_PI = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715
SIGMOID_SLOPE = {"silu": 1.0, "qgelu": 1.702}


class ActivationBackward(NamedTuple):
    """The gradient of the input x [rows, cols] in each requested form; otherwise None."""

    dx: Tensor | None
    """[rows, cols] in x's dtype."""
    rowwise: Tensor | None
    """FP8 [rows, cols]."""
    columnwise: Tensor | None
    """FP8 [cols, rows]."""
    column_sum: Tensor | None
    """[cols], the sums over rows."""


def forward_tile(dtype: torch.dtype, cols: int, is_gated: bool, is_transposed: bool) -> Tile:
    return find("activation_forward" + ", gated" * is_gated + ", transpose" * is_transposed, dtype, cols)


def backward_tile(
    dtype: torch.dtype, cols: int, is_gated: bool, is_transposed: bool, is_summed: bool
) -> Tile:
    form = ", sum" if is_summed else ", transpose" * is_transposed
    return find("activation_backward" + ", gated" * is_gated + form, dtype, cols)


def _value_and_slope_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """f(x) and f'(x) in plain PyTorch, FP32."""
    if kind == "gelu":
        share = torch.sigmoid(TWO_ROOT_TWO_OVER_PI * x * (1 + CUBIC * x * x))
        inner_slope = TWO_ROOT_TWO_OVER_PI * (1 + 3 * CUBIC * x * x)
        return x * share, share + x * share * (1 - share) * inner_slope
    if kind in SIGMOID_SLOPE:
        factor = SIGMOID_SLOPE[kind]
        share = torch.sigmoid(factor * x)
        return x * share, share + factor * x * share * (1 - share)
    if kind == "sigmoid":
        share = torch.sigmoid(x)
        return share, share * (1 - share)
    positive = x.clamp(min=0)
    if kind == "srelu":
        return positive * positive, 2 * positive
    return positive, (x > 0).float()


def forward_reference(
    x: Tensor,
    kind: str,
    is_gated: bool,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    halves = x.float().chunk(2, 1) if is_gated else (x.float(),)
    value, _ = _value_and_slope_of(halves[0], kind)
    write_outputs(value * halves[1] if is_gated else value, out, rowwise, columnwise, scale, amax)


def backward_reference(
    dy: Tensor,
    x: Tensor,
    kind: str,
    is_gated: bool,
    dx: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    column_sum: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    grad = dy.float()
    halves = x.float().chunk(2, 1) if is_gated else (x.float(),)
    value, slope = _value_and_slope_of(halves[0], kind)
    result = torch.cat([grad * halves[1] * slope, grad * value], 1) if is_gated else grad * slope
    if column_sum is not None:
        column_sum.copy_(result.sum(0))
    write_outputs(result, dx, rowwise, columnwise, scale, amax)


@jit
def _share(exponent):
    """1 / (1 + 2^exponent) as the square of a reciprocal root: a division takes seven instructions more."""
    root = tl.rsqrt(1.0 + tl.exp2(exponent))
    return root * root


@jit
def _value_and_slope(x, KIND: tl.constexpr, SLOPE_OF_INNER: tl.constexpr, CUBIC: tl.constexpr):
    """f(x) and f'(x), FP32."""
    log2_e: tl.constexpr = 1.4426950408889634
    if KIND == "gelu":
        share = _share(x * (-log2_e * SLOPE_OF_INNER - log2_e * SLOPE_OF_INNER * CUBIC * x * x))
        value = x * share
        slope = share + value * (1 - share) * (SLOPE_OF_INNER + 3 * SLOPE_OF_INNER * CUBIC * x * x)
    elif KIND == "silu" or KIND == "qgelu":
        factor: tl.constexpr = 1.702 if KIND == "qgelu" else 1.0
        share = _share(-log2_e * factor * x)
        value = x * share
        slope = share + factor * value * (1 - share)
    elif KIND == "sigmoid":
        value = _share(-log2_e * x)
        slope = value * (1 - value)
    else:
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(x > 0, 1.0, 0.0)
        if KIND == "srelu":
            slope = 2 * value
            value = value * value
    return value, slope


@jit
def _forward_kernel(
    x_ptr,  # input [rows, cols], or [rows, 2 * cols] if gated, FP32, fp16 or bf16
    out_ptr,  # y [rows, cols], x's dtype; None: not written, like the next two and the amax
    rowwise_ptr,  # y scaled [rows, cols], FP8
    columnwise_ptr,  # its transpose [cols, rows], FP8
    scale_ptr,  # scale of the FP8 forms, one FP32 number; None: 1
    amax_ptr,  # raised to max |y|, one FP32 number
    rows,
    cols,  # of y
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    SLOPE_OF_INNER: tl.constexpr,
    CUBIC: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Apply the function to one tile."""
    across = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * (2 * PAIRS)
    col = (tl.program_id(0) % across) * BLOCK_COLS
    rows_left, cols_left = (rows - row).to(tl.int32), cols - col
    width = 2 * cols if IS_GATED else cols
    x_ptr += row * width + col
    x_upper, x_lower = load_row_pairs(x_ptr, width, rows_left, cols_left, PAIRS, BLOCK_COLS)
    upper, _ = _value_and_slope(x_upper, KIND, SLOPE_OF_INNER, CUBIC)
    lower, _ = _value_and_slope(x_lower, KIND, SLOPE_OF_INNER, CUBIC)
    if IS_GATED:
        at_linear = x_ptr + cols
        x_upper, x_lower = load_row_pairs(at_linear, width, rows_left, cols_left, PAIRS, BLOCK_COLS)
        upper *= x_upper
        lower *= x_lower
    if amax_ptr is not None:
        record_amax(amax_ptr, larger_magnitude(upper, lower))
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    store_pairs(
        *(upper, lower, row, col, rows, cols, rows_left, cols_left),
        *(out_ptr, rowwise_ptr, columnwise_ptr, scale, WHOLE),
    )


@jit
def _backward_kernel(
    dy_ptr,  # gradient of y [rows, cols], FP32, fp16 or bf16
    x_ptr,  # input of the forward [rows, width], dy's dtype; width is cols, or 2 * cols if gated
    dx_ptr,  # gradient of x [rows, width], x's dtype; None: not written, like the next three and the amax
    rowwise_ptr,  # dx scaled [rows, width], FP8
    columnwise_ptr,  # its transpose [width, rows], FP8
    band_sums_ptr,  # sums over the rows of each program [bands, width], FP32
    scale_ptr,  # scale of the FP8 forms, one FP32 number; None: 1
    amax_ptr,  # raised to max |dx|, one FP32 number
    rows,
    cols,  # of dy
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    SLOPE_OF_INNER: tl.constexpr,
    CUBIC: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,  # tiles on their way from memory at a time
    STEPS: tl.constexpr,  # tiles of one program, one below the other
    SUM_PAIRS: tl.constexpr,  # rows of partial sums, as by `fold`
):
    """Compute the gradient of STEPS tiles, one below the other, and its sums over rows."""
    across = tl.cdiv(cols, BLOCK_COLS)
    band = (tl.program_id(0) // across).to(tl.int64)
    col = (tl.program_id(0) % across) * BLOCK_COLS
    cols_left = cols - col
    width = 2 * cols if IS_GATED else cols
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    sums = tl.zeros([SUM_PAIRS, BLOCK_COLS], tl.float32)
    linear_sums = tl.zeros([SUM_PAIRS, BLOCK_COLS], tl.float32)
    largest = tl.zeros([PAIRS, BLOCK_COLS], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (band * STEPS + step) * (2 * PAIRS)
        rows_left = (rows - row).to(tl.int32)
        at_x = x_ptr + row * width + col
        x_upper, x_lower = load_row_pairs(at_x, width, rows_left, cols_left, PAIRS, BLOCK_COLS)
        at_dy = dy_ptr + row * cols + col
        upper, lower = load_row_pairs(at_dy, cols, rows_left, cols_left, PAIRS, BLOCK_COLS)
        value_upper, slope_upper = _value_and_slope(x_upper, KIND, SLOPE_OF_INNER, CUBIC)
        value_lower, slope_lower = _value_and_slope(x_lower, KIND, SLOPE_OF_INNER, CUBIC)
        if IS_GATED:
            linear_upper, linear_lower = upper * value_upper, lower * value_lower
            x_upper, x_lower = load_row_pairs(at_x + cols, width, rows_left, cols_left, PAIRS, BLOCK_COLS)
            upper *= x_upper
            lower *= x_lower
        upper *= slope_upper
        lower *= slope_lower
        if amax_ptr is not None:
            largest = larger_magnitude(largest, larger_magnitude(upper, lower))
            if IS_GATED:
                largest = larger_magnitude(largest, larger_magnitude(linear_upper, linear_lower))
        if band_sums_ptr is not None:
            sums += fold(upper + lower, SUM_PAIRS)
            if IS_GATED:
                linear_sums += fold(linear_upper + linear_lower, SUM_PAIRS)
        store_pairs(
            *(upper, lower, row, col, rows, width, rows_left, cols_left),
            *(dx_ptr, rowwise_ptr, columnwise_ptr, scale, WHOLE),
        )
        if IS_GATED:
            store_pairs(
                *(linear_upper, linear_lower, row, cols + col, rows, width, rows_left, cols_left),
                *(dx_ptr, rowwise_ptr, columnwise_ptr, scale, WHOLE),
            )
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)
    if band_sums_ptr is not None:
        at = tl.arange(0, BLOCK_COLS)
        band_sums_ptr += band * width + col
        tl.store(band_sums_ptr + at, tl.sum(sums, axis=0), at < cols_left)
        if IS_GATED:
            tl.store(band_sums_ptr + cols + at, tl.sum(linear_sums, axis=0), at < cols_left)


@for_each_shape
def _prepared_forward(rows: int, cols: int, kind: str, is_gated: bool, tile: Tile) -> PreparedKernel:
    return PreparedKernel(
        _forward_kernel,
        (cdiv(rows, tile.rows) * cdiv(cols, tile.cols),),
        *(rows, cols, kind, is_gated, TWO_ROOT_TWO_OVER_PI, CUBIC),
        *(rows % WHOLE_ROWS == 0, tile.rows // 2, tile.cols),
        **tile.options,
    )


@for_each_shape
def _prepared_backward(
    rows: int, cols: int, kind: str, is_gated: bool, tile: Tile, vector: int
) -> PreparedKernel:
    bands = cdiv(rows, tile.rows * tile.steps)
    return PreparedKernel(
        _backward_kernel,
        (bands * cdiv(cols, tile.cols),),
        *(rows, cols, kind, is_gated, TWO_ROOT_TWO_OVER_PI, CUBIC),
        *(rows % WHOLE_ROWS == 0, tile.rows // 2, tile.cols, tile.stages, tile.steps),
        min(tile.rows // 2, rows_at_once(tile, vector)),
        **tile.options,
    )


def forward_launch(
    x: Tensor,
    kind: str,
    is_gated: bool,
    out: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    rows, cols = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    tile = forward_tile(x.dtype, cols, is_gated, columnwise is not None)
    _prepared_forward(rows, cols, kind, is_gated, tile)(x, out, rowwise, columnwise, scale, amax)


def backward_launch(
    dy: Tensor,
    x: Tensor,
    kind: str,
    is_gated: bool,
    dx: Tensor | None,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    column_sum: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    rows, cols = dy.shape
    tile = backward_tile(x.dtype, cols, is_gated, columnwise is not None, column_sum is not None)
    band_sums = None
    if column_sum is not None:
        band_sums = new_bands(column_sum, cdiv(rows, tile.rows * tile.steps))
    start = _prepared_backward(rows, cols, kind, is_gated, tile, vector_of(x, rowwise))
    start(dy, x, dx, rowwise, columnwise, band_sums, scale, amax)
    if band_sums is not None and column_sum is not None:
        sum_bands(band_sums, column_sum)


_activation_forward = operator(
    "activation_forward_(Tensor x, str kind, bool is_gated, Tensor(a!)? out, Tensor(b!)? rowwise, "
    "Tensor(c!)? columnwise, Tensor? scale, Tensor(d!)? amax) -> ()",
    reference=forward_reference,
    launch=forward_launch,
)
_activation_backward = operator(
    "activation_backward_(Tensor dy, Tensor x, str kind, bool is_gated, Tensor(a!)? dx, "
    "Tensor(b!)? rowwise, Tensor(c!)? columnwise, Tensor(d!)? column_sum, Tensor? scale, "
    "Tensor(e!)? amax) -> ()",
    reference=backward_reference,
    launch=backward_launch,
)


def activation_forward(
    x: Tensor,
    name: str,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    high_precision: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Outputs:
    """Apply an activation function.

    Args:
        x: [rows, cols], or [rows, 2 * cols] for gated functions; FP32, FP16 or bf16, contiguous.
        name: one of `NAMES`.
        scale: FP32, one element: multiplies values before the cast to FP8.
        amax: FP32, one element: raised to max |y| of the FP32 result before scaling.
        dtype: float8_e4m3fn or float8_e5m2, the dtype of the FP8 outputs.
        high_precision: whether to return y in x's dtype.
        rowwise: whether to return y in FP8; ignored without `dtype`.
        columnwise: whether to return y transposed in FP8.

    Returns:
        `out` [rows, cols] in x's dtype, `rowwise` [rows, cols] and `columnwise` [cols, rows] in FP8.

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    cols = _cols(x, name)
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
    _activation_forward(x, GATED.get(name, name), name in GATED, *outputs, scale, amax)
    return outputs


def activation_backward(
    dy: Tensor,
    x: Tensor,
    name: str,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    high_precision: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    column_sum: torch.dtype | None = None,
) -> ActivationBackward:
    """Compute the gradient of `activation_forward` with respect to x.

    Args:
        dy: [rows, cols], gradient of the result, in x's dtype.
        x: the input of the forward.
        name: one of `NAMES`.
        scale: FP32, one element: multiplies gradients before the cast to FP8.
        amax: FP32, one element: raised to max |dx| of the FP32 gradient before scaling.
        dtype: float8_e4m3fn or float8_e5m2, the dtype of the FP8 outputs.
        high_precision: whether to return dx in x's dtype.
        rowwise: whether to return dx in FP8; ignored without `dtype`.
        columnwise: whether to return dx transposed in FP8.
        column_sum: dtype of the sums over rows of the FP32 gradient, which are the bias gradient of the
            linear layer before; deterministic.  None: not returned.

    Raises:
        ValueError: if shapes, dtypes or options do not fit.
    """
    check_input("x", x)
    check_like("dy", dy, x, (x.shape[0], _cols(x, name)), x.dtype)
    outputs = allocate_outputs(
        x,
        x.shape[1],
        scale=scale,
        amax=amax,
        dtype=dtype,
        high_precision=high_precision,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    sums = None if column_sum is None else x.new_empty(x.shape[1], dtype=column_sum)
    _activation_backward(dy, x, GATED.get(name, name), name in GATED, *outputs, sums, scale, amax)
    return ActivationBackward(outputs.out, outputs.rowwise, outputs.columnwise, sums)


def _cols(x: Tensor, name: str) -> int:
    """Number of columns of the result."""
    if name not in NAMES:
        raise ValueError(f"there is no activation {name!r}; choose one of {', '.join(NAMES)}")
    if name in GATED and x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} columns; {name} needs two halves, [activated | linear]")
    return x.shape[1] // 2 if name in GATED else x.shape[1]
