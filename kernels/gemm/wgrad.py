"""The weight gradient, accumulated by the GEMM itself into the flat buffer.

        target  = dy^T x           the first time  (target is not read)
        target += dy^T x           later           (one rounding: the FP32 sum is added to target)

for dy [tokens, out], x [tokens, in] and target [out, in], FP32, or bf16 for the gradient of one microbatch.
Sums are FP32 and rounded once to bf16.  On CUDA it runs:

    FP8, bf16, fp16    cuBLASLt through nvmath-python, beta = 0 or 1, in place
    the same without nvmath-python or without a fitting algorithm of cuBLASLt (which has none from fp16 to
    bf16), and FP32    `torch._scaled_mm` or `torch.mm` into an FP32 temporary, which is copied or added

Hopper's FP8 GEMM reads both operands along K, which is tokens here, so FP8 operands are passed transposed:
dy_t [out, tokens] and x_t [in, tokens], as `cast(..., columnwise=True)` makes them.  There is no Triton GEMM
here: on H200 one reaches 0.7 to 0.8 of `torch._scaled_mm` with an add in FP8, and 1.03 of it in bf16.

Bytes per element of the target, beyond the operands: 4 the first time and 8 later, in the GEMM's epilogue and
hidden behind its arithmetic; a temporary and an add are 16.  With a bf16 target all of them are half.

Bit-equality: a shape has one algorithm, without split-K, for beta = 0 and 1 and for every buffer.  With bf16
and fp16 operands, fused therefore equals unfused (`wgrad_unfused`): FP32 sums are added to the target with
one rounding.  In FP8 this holds if the scales are powers of two: scaling the sum is exact, and only the add
rounds; with other scales the fused form may round once where the unfused one rounds twice.  With a bf16
target the unfused product is rounded before it is added, so the two are equal the first time only.
`torch.addmm` in place does not qualify: for beta = 1 cuBLAS may choose another algorithm than for beta = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.gemm.cublas_lt import (
    ADDRESS_ALIGNMENT,
    PreparedMatmul,
    Product,
    are_readable,
    prepared_matmul,
)
from flatfsdp.kernels.gemm.gemm import ALIGNMENT, FP8_PAIRS, scaled_mm
from flatfsdp.kernels.grad.accumulate import TARGET_DTYPES, accumulate
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import FP8_DTYPES, HIGH_DTYPES, check_scalars
from flatfsdp.kernels.shared.triton import is_here, on_device_of


def reference(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    accumulate(target, dy.float().t() @ x.float(), first=first)


def launch(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    if not is_here(target):
        with on_device_of(target):
            launch(target, dy, x, first)
        return
    rows, cols = target.shape
    product = Product(
        rows,
        cols,
        dy.shape[0],
        dy.dtype,
        x.dtype,
        target.dtype,
        a_along=False,
        b_along=False,
        sums_once=True,
    )
    matmul = prepared_matmul(target.device, product)
    if matmul is not None:
        dy, x = _readable(dy, x)
        _run(matmul, target, dy, x, None, first)
    elif dy.dtype == torch.float32:
        accumulate(target, torch.mm(dy.t(), x), first=first)
    else:
        accumulate(target, torch.mm(dy.t(), x, out_dtype=torch.float32), first=first)


def flops(target: tuple[int, int], dy: tuple[int, int], *others: object, **named: object) -> int:
    """Operations of the GEMM, from the shapes of the target and of one operand."""
    return 2 * target[1] * dy[0] * dy[1]


_wgrad = operator(
    "wgrad_(Tensor(a!) target, Tensor dy, Tensor x, bool first) -> ()",
    reference=reference,
    launch=launch,
    flops=flops,
)


def reference_fp8(
    target: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    dy_scale_inv: Tensor,
    x_scale_inv: Tensor,
    first: bool,
    split_accumulator: bool,
) -> None:
    # Products of FP8 numbers are exact in FP32; both accumulators of the GPU are less exact than this sum.
    product = dy_t.float() @ x_t.float().t()
    accumulate(target, product * (dy_scale_inv * x_scale_inv), first=first)


def launch_fp8(
    target: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    dy_scale_inv: Tensor,
    x_scale_inv: Tensor,
    first: bool,
    split_accumulator: bool,
) -> None:
    if not is_here(target):
        with on_device_of(target):
            launch_fp8(target, dy_t, x_t, dy_scale_inv, x_scale_inv, first, split_accumulator)
        return
    dy_t, x_t = _readable(dy_t, x_t)
    rows, cols = target.shape
    product = Product(
        rows,
        cols,
        dy_t.shape[1],
        dy_t.dtype,
        x_t.dtype,
        target.dtype,
        split_accumulator=split_accumulator,
        sums_once=True,
    )
    matmul = prepared_matmul(target.device, product)
    if matmul is not None:
        _run(matmul, target, dy_t, x_t, (dy_scale_inv, x_scale_inv), first)
        return
    grad = scaled_mm(
        dy_t,
        x_t,
        dy_scale_inv,
        x_scale_inv,
        bias=None,
        out_dtype=torch.float32,
        split_accumulator=split_accumulator,
    )
    accumulate(target, grad, first=first)


_wgrad_fp8 = operator(
    "wgrad_fp8_(Tensor(a!) target, Tensor dy_t, Tensor x_t, Tensor dy_scale_inv, Tensor x_scale_inv, "
    "bool first, bool split_accumulator) -> ()",
    reference=reference_fp8,
    launch=launch_fp8,
    flops=flops,
)


def _run(
    matmul: PreparedMatmul,
    target: Tensor,
    dy: Tensor,
    x: Tensor,
    scale_invs: tuple[Tensor, Tensor] | None,
    first: bool,
) -> None:
    """Run the GEMM, through a temporary if cuBLASLt cannot write to the target."""
    if target.data_ptr() % ADDRESS_ALIGNMENT:
        # The GEMM adds to a copy: a bf16 product would have been rounded before it is added.
        moved = torch.empty_like(target) if first else target.clone()
        matmul.run(moved, dy, x, scale_invs, adds=not first)
        target.copy_(moved)
    else:
        matmul.run(target, dy, x, scale_invs, adds=not first)


def _readable(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands, or copies if cuBLASLt cannot read them: expanded gradients, slices at odd offsets."""
    if are_readable(dy, x):
        return dy, x
    memory_format = torch.contiguous_format
    dy, x = (each if are_readable(each) else each.clone(memory_format=memory_format) for each in (dy, x))
    return dy, x


def wgrad(
    target: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    first: bool,
    dy_scale_inv: Tensor | None = None,
    x_scale_inv: Tensor | None = None,
    split_accumulator: bool = True,
) -> None:
    """Write (`first`) or add the weight gradient dy^T x to `target`, in place.

    FP8 operands are E4M3 or E5M2, not both E5M2, and out, in and tokens are multiples of 16.  Sums are FP32
    and rounded once to the target's dtype, with what it held if they are added to it.

    Args:
        target: FP32 or bf16 [out, in], contiguous; usually a slot of the unit's flat gradient buffer.
        dy: [tokens, out] in bf16, fp16 or FP32; in FP8 its transpose [out, tokens], contiguous.
        x: [tokens, in] in dy's dtype; in FP8 its transpose [in, tokens], contiguous.
        first: overwrite `target` instead of adding to it.
        dy_scale_inv: FP8 only: FP32, one element, factor of dy (1 / scale of the cast).
        x_scale_inv: the same for x.
        split_accumulator: FP8 only: promote partial sums to FP32 registers at intervals, as in Transformer
            Engine's backward GEMMs.  False is fast accumulation, exact to about 13 bits.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit, or scales are missing or not expected.
    """
    _check_target(target, dy, x)
    if dy.dtype in FP8_DTYPES or x.dtype in FP8_DTYPES:
        _check_fp8(target, dy, x)
        for name, scale_inv in (("dy_scale_inv", dy_scale_inv), ("x_scale_inv", x_scale_inv)):
            if scale_inv is None:
                raise ValueError(
                    f"{name} is missing; FP8 operands need the inverse of the scale they were cast with"
                )
        check_scalars(target, ("dy_scale_inv", dy_scale_inv), ("x_scale_inv", x_scale_inv))
        _wgrad_fp8(target, dy, x, dy_scale_inv, x_scale_inv, first, split_accumulator)
        return
    _check_high_precision(target, dy, x)
    if dy_scale_inv is not None or x_scale_inv is not None:
        raise ValueError(f"dy_scale_inv and x_scale_inv are for FP8 operands; dy is {dy.dtype}")
    _wgrad(target, dy, x, first)


def wgrad_unfused(
    target: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    first: bool,
    dy_scale_inv: Tensor | None = None,
    x_scale_inv: Tensor | None = None,
    split_accumulator: bool = True,
) -> None:
    """Accumulate a weight gradient in two passes: a GEMM into a temporary, then a copy or an add.

    It is the unfused gradient that `wgrad` is compared with, bit for bit; the arguments are those of `wgrad`.
    The temporary has the target's dtype, so what is added to a bf16 target has been rounded before.
    """
    product = torch.empty_like(target)
    wgrad(
        product,
        dy,
        x,
        first=True,
        dy_scale_inv=dy_scale_inv,
        x_scale_inv=x_scale_inv,
        split_accumulator=split_accumulator,
    )
    accumulate(target, product, first=first)


def _check_target(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if target.dim() != 2 or target.dtype not in TARGET_DTYPES or not target.is_contiguous():
        raise ValueError(
            f"target is {target.dtype} {tuple(target.shape)} with strides {target.stride()}; wgrad "
            "accumulates into a contiguous matrix in FP32 or bf16"
        )
    if not target.device == dy.device == x.device:
        raise ValueError(
            f"target is on {target.device}, dy on {dy.device} and x on {x.device}; wgrad needs one device"
        )


def _check_high_precision(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if dy.dtype not in HIGH_DTYPES or x.dtype != dy.dtype:
        raise ValueError(
            f"dy is {dy.dtype} and x {x.dtype}; wgrad takes both in bf16, both in fp16, both in FP32, or FP8"
        )
    if dy.dim() != 2 or x.dim() != 2 or (dy.shape[0], dy.shape[1], x.shape[1]) != (x.shape[0], *target.shape):
        raise ValueError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}; for a target [out, in] = {tuple(target.shape)} "
            "they have to be [tokens, out] and [tokens, in]"
        )


def _check_fp8(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if (dy.dtype, x.dtype) not in FP8_PAIRS:
        raise ValueError(
            f"dy is {dy.dtype} and x {x.dtype}; an FP8 GEMM takes two FP8 operands, at most one in E5M2"
        )
    if dy.dim() != 2 or x.dim() != 2 or (*target.shape, dy.shape[1]) != (dy.shape[0], x.shape[0], x.shape[1]):
        raise ValueError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}; for a target [out, in] = {tuple(target.shape)} "
            "FP8 operands have to be transposed: [out, tokens] and [in, tokens]"
        )
    if not dy.is_contiguous() or not x.is_contiguous():
        raise ValueError("dy and x in FP8 have to be contiguous: cast them with columnwise=True")
    rows, cols, tokens = (*target.shape, dy.shape[1])
    if not (rows and cols and tokens) or rows % ALIGNMENT or cols % ALIGNMENT or tokens % ALIGNMENT:
        raise ValueError(
            f"out, in and tokens are {(rows, cols, tokens)}; FP8 GEMMs need multiples of {ALIGNMENT}: pad "
            "them, or keep this layer in bf16"
        )
