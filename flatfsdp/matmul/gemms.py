"""The three GEMMs of a linear map over `Operand`s, in FP8 or not.

    fprop   y  = x w^T + bias   x [tokens, in], w [out, in]
    dgrad   dx = dy w           dy [tokens, out]
    wgrad   dw = dy^T x         into a buffer in FP32 or bf16, or as a tensor

FP8 GEMMs return the FP32 sum times 1 / (scale of a * scale of b).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.contract.recipe import SplitAccumulator
from flatfsdp.kernels.gemm import wgrad as wgrad_kernels
from flatfsdp.kernels.gemm.block_gemm import block_scaled_mm
from flatfsdp.kernels.gemm.gemm import scaled_mm
from flatfsdp.kernels.grad.accumulate import accumulate


def fprop(
    x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype, split: SplitAccumulator
) -> Tensor:
    """Forward GEMM: [tokens, out] in `dtype`, which is also that of the bias."""
    if x.high is not None:
        assert weight.high is not None
        return F.linear(x.high, weight.high, bias)
    return _multiply(x.rowwise, x.rowwise_inv, weight.rowwise, weight.rowwise_inv, dtype, split.fprop, bias)


def dgrad(dy: Operand, weight: Operand, dtype: torch.dtype, split: SplitAccumulator) -> Tensor:
    """GEMM of the input's gradient: [tokens, in] in `dtype`."""
    if dy.high is not None:
        assert weight.high is not None
        return dy.high @ weight.high
    return _multiply(dy.rowwise, dy.rowwise_inv, weight.columnwise, weight.columnwise_inv, dtype, split.dgrad)


def wgrad(dy: Operand, x: Operand, dtype: torch.dtype, split: SplitAccumulator) -> Tensor:
    """GEMM of the weight's gradient: [out, in] in `dtype`; in FP32 bit-equal to `accumulate_wgrad`."""
    # By the kernel that accumulates, for its bits; without tokens, because that gives zeros.
    if dtype == torch.float32 or _tokens(dy) == 0:
        left = _columns(dy)
        target = left.new_empty(left.shape[0], _columns(x).shape[0], dtype=torch.float32)
        accumulate_wgrad(target, dy, x, split, first=True)
        return target.to(dtype)
    if dy.high is not None:
        assert x.high is not None
        return dy.high.t() @ x.high
    return _multiply(dy.columnwise, dy.columnwise_inv, x.columnwise, x.columnwise_inv, dtype, split.wgrad)


def accumulate_wgrad(
    target: Tensor, dy: Operand, x: Operand, split: SplitAccumulator, *, first: bool, two_passes: bool = False
) -> None:
    """Writes (`first`) or adds dy^T x to `target`; in the GEMM itself or in two passes.

    Args:
        target: FP32 or bf16 [out, in], contiguous; FP32 sums are rounded once to bf16.
        dy: gradient of the output.
        x: the input.
        split: accumulators of FP8 GEMMs.
        first: overwrite what `target` holds.
        two_passes: compute the product in a temporary of the target's dtype first.
    """
    if _tokens(dy) == 0:
        # Nothing to add, but the first write of a step has to overwrite the last step's sums.
        if first:
            target.zero_()
        return
    kernel = wgrad_kernels.wgrad_unfused if two_passes else wgrad_kernels.wgrad
    if dy.high is not None:
        assert x.high is not None
        kernel(target, dy.high, x.high, first=first)
        return
    assert dy.columnwise is not None and x.columnwise is not None
    if is_blockwise(dy.columnwise_inv):
        # cuBLASLt supports no beta for block scaling.
        dw = _multiply(
            dy.columnwise, dy.columnwise_inv, x.columnwise, x.columnwise_inv, torch.float32, split.wgrad
        )
        accumulate(target, dw, first=first)
        return
    kernel(
        target,
        dy.columnwise,
        x.columnwise,
        first=first,
        dy_scale_inv=dy.columnwise_inv,
        x_scale_inv=x.columnwise_inv,
        split_accumulator=split.wgrad,
    )


def _multiply(
    a: Tensor | None,
    a_inv: Tensor | None,
    b: Tensor | None,
    b_inv: Tensor | None,
    dtype: torch.dtype,
    split: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiplies a [m, k] by b [n, k] transposed."""
    assert a is not None and a_inv is not None and b is not None and b_inv is not None
    if is_blockwise(a_inv):
        out = block_scaled_mm(a, a_inv, b, b_inv, dtype)
        return out if bias is None else out.add_(bias)
    return scaled_mm(a, b, a_inv, b_inv, bias=bias, out_dtype=dtype, split_accumulator=split)


def is_blockwise(scale_inv: Tensor | None) -> bool:
    """Whether there is one scale per block; otherwise there is one for the tensor."""
    return scale_inv is not None and scale_inv.dim() == 2


def _columns(operand: Operand) -> Tensor:
    """The matrix as [features, tokens]."""
    found = operand.columnwise if operand.high is None else operand.high.t()
    assert found is not None
    return found


def _tokens(dy: Operand) -> int:
    if dy.high is not None:
        return dy.high.shape[0]
    assert dy.columnwise is not None
    return dy.columnwise.shape[1]
