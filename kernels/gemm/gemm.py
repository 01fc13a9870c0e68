"""FP8 GEMMs of a linear layer's forward and of its input's gradient.

    out = a b^T * (a_scale_inv * b_scale_inv) + bias

    fprop   a = x [tokens, in],    b = weight [out, in]
    dgrad   a = dy [tokens, out],  b = weight transposed [in, out]

for a [M, K], b [N, K] and out [M, N].  Hopper's FP8 GEMMs read both operands along K.  On CUDA this is
cuBLASLt, by the algorithm that `cublas_lt.py` keeps for the shape, or else through `torch._scaled_mm`.  The
bias is added to FP32 sums in the GEMM's epilogue and rounded with them.  An FP32 result gets it in a separate
pass, because `_scaled_mm` supports no bias there.

Bytes: those of a, b and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.gemm.cublas_lt import Product, are_readable, prepared_matmul
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import FP8_DTYPES, HIGH_DTYPES, check_scalars
from flatfsdp.kernels.shared.triton import is_here, on_device_of

E4M3, E5M2 = FP8_DTYPES
FP8_PAIRS = {(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)}
"""Formats of the two operands of an FP8 GEMM."""

ALIGNMENT = 16
"""Sizes, and addresses in bytes, of FP8 GEMMs have to be multiples of it."""


def reference(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out: Tensor,
    split_accumulator: bool,
) -> None:
    # Products of FP8 numbers are exact in FP32; both accumulators of the GPU are less exact than this sum.
    product = a.float() @ b.float().t() * (a_scale_inv * b_scale_inv)
    out.copy_(product if bias is None else product + bias.float())


def launch(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out: Tensor,
    split_accumulator: bool,
) -> None:
    if not is_here(out):
        with on_device_of(out):
            launch(a, b, a_scale_inv, b_scale_inv, bias, out, split_accumulator)
        return
    inside = bias if out.dtype != torch.float32 else None
    matmul = None
    if are_readable(a, b) and (inside is None or are_readable(inside)):
        rows, cols = out.shape
        product = Product(
            rows,
            cols,
            a.shape[1],
            a.dtype,
            b.dtype,
            out.dtype,
            split_accumulator=split_accumulator,
            has_bias=inside is not None,
            # Weight gradients that `wgrad.py` cannot compute in place are among these.
            sums_once=out.dtype == torch.float32,
        )
        matmul = prepared_matmul(out.device, product)
    if matmul is not None:
        matmul.run(out, a, b, (a_scale_inv, b_scale_inv), inside)
    else:
        torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale_inv,
            scale_b=b_scale_inv,
            bias=inside,
            out_dtype=out.dtype,
            use_fast_accum=not split_accumulator,
            out=out,
        )
    if bias is not None and inside is None:
        out.add_(bias)


def flops(a: tuple[int, int], b: tuple[int, int], *others: object, **named: object) -> int:
    """Operations of the GEMM, from the shapes of its operands."""
    return 2 * a[0] * a[1] * b[0]


_scaled_mm = operator(
    "scaled_mm_(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor(a!) out, "
    "bool split_accumulator) -> ()",
    reference=reference,
    launch=launch,
    flops=flops,
)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    """Multiply two FP8 matrices: a b^T, [M, N] in `out_dtype`.

    Args:
        a: FP8 [M, K], contiguous; M may be 0.
        b: FP8 [N, K], contiguous; at most one of both is E5M2.
        a_scale_inv: FP32, one element, factor of a (1 / scale of the cast).
        b_scale_inv: the same for b.
        bias: [N], contiguous, in `out_dtype`; with FP32 results also in bf16 or fp16.
        out_dtype: bf16, fp16 or FP32.
        split_accumulator: promote partial sums to FP32 registers at intervals, as in Transformer Engine's
            backward GEMMs.  False is fast accumulation, exact to about 13 bits.

    Raises:
        ValueError: if shapes, dtypes, strides or devices do not fit; K and N have to be multiples of 16.
    """
    check_operands(a, b, out_dtype)
    check_scalars(a, ("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv))
    if bias is not None:
        _check_bias(bias, b, out_dtype)
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    if a.shape[0]:
        _scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, out, split_accumulator)
    return out


def check_operands(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    """Check the operands of an FP8 GEMM.

    Raises:
        ValueError: if `a` [M, K] and `b` [N, K] cannot be operands of an FP8 GEMM with such a result.
    """
    if (a.dtype, b.dtype) not in FP8_PAIRS:
        raise ValueError(
            f"a is {a.dtype} and b {b.dtype}; an FP8 GEMM takes two FP8 operands, at most one in E5M2"
        )
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.device != b.device:
        raise ValueError(
            f"a is {tuple(a.shape)} on {a.device} and b {tuple(b.shape)} on {b.device}; they have to be "
            "[M, K] and [N, K] on one device: both operands end with the dimension that is summed over"
        )
    if not (a.is_contiguous() and b.is_contiguous()):
        for name, operand in (("a", a), ("b", b)):
            if operand.is_contiguous():
                continue
            raise ValueError(
                f"{name} has strides {operand.stride()}; it has to be contiguous: FP8 GEMMs read along K, so "
                "cast with columnwise=True for the transpose"
            )
    rows, inner = b.shape
    if rows == 0 or inner == 0 or rows % ALIGNMENT or inner % ALIGNMENT:
        raise ValueError(
            f"b [N, K] is {tuple(b.shape)}; FP8 GEMMs need multiples of {ALIGNMENT}: pad them, or keep this "
            "layer in bf16"
        )
    if out_dtype not in HIGH_DTYPES:
        raise ValueError(
            f"out_dtype is {out_dtype}; it has to be torch.bfloat16, torch.float16 or torch.float32"
        )


def _check_bias(bias: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
    fits = bias.shape == b.shape[:1] and bias.is_contiguous() and bias.device == b.device
    allowed = HIGH_DTYPES if out_dtype == torch.float32 else (out_dtype,)
    if not fits or bias.dtype not in allowed:
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)} with strides {bias.stride()} on {bias.device}; for "
            f"results in {out_dtype} it has to be contiguous, [{b.shape[0]}] on {b.device}, in "
            f"{' or '.join(str(dtype) for dtype in allowed)}: cast it"
        )
