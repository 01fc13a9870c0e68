"""GEMMs of FP8 matrices with one scale per block, as `block_cast` makes them.

    out = A B^T  with  A = a * a_scale_inv,  B = b * b_scale_inv, each element with the scale of its block

    fprop    a = x [tokens, in], 1x128                b = weight [out, in], 128x128
    dgrad    a = dy [tokens, out], 1x128              b = weight transposed [in, out], 128x128
    wgrad    a = dy transposed [out, tokens], 1x128   b = x transposed [in, tokens], 1x128

for a [M, K], b [N, K] and out [M, N].  On CUDA this is cuBLASLt through `torch._scaled_mm_v2`, on Hopper
only. Each 128 of K are summed in FP8's accumulator, then scaled and accumulated in FP32; there is no fast
accumulation.

Bytes: those of a, b, their scales and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.cast.block_cast import BLOCK, DTYPE, expand_blocks, padded_blocks
from flatfsdp.kernels.gemm.gemm import ALIGNMENT, check_operands, flops
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.triton import cdiv, on_device_of


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """The FP32 values [rows, cols] of a result of `block_cast`; exact if scales are powers of two."""
    height = 1 if scale_inv.shape[0] == q.shape[0] else BLOCK
    return q.float() * expand_blocks(scale_inv, height, q)


def reference(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor) -> None:
    out.copy_(dequantize(a, a_scale_inv) @ dequantize(b, b_scale_inv).t())


def launch(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor) -> None:
    kinds = torch.nn.functional.ScalingType
    by_row = [kinds.BlockWise1x128.value]
    by_square = [kinds.BlockWise128x128.value]
    is_square = b_scale_inv.shape[0] != b.shape[0]
    with on_device_of(out):
        torch._scaled_mm_v2(
            a,
            b.t(),
            [a_scale_inv],
            by_row,
            [],
            [b_scale_inv.t() if is_square else b_scale_inv],
            by_square if is_square else by_row,
            [],
            None,
            out.dtype,
            out=out,
        )


_block_scaled_mm = operator(
    "block_scaled_mm_(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor(a!) out) -> ()",
    reference=reference,
    launch=launch,
    flops=flops,
)


def block_scaled_mm(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiply two matrices in E4M3: A B^T, [M, N] in `out_dtype`.

    Args:
        a: E4M3 [M, K], contiguous; M is a multiple of 16 and may be 0.
        a_scale_inv: from `block_cast(..., block="1x128")`: FP32 [M, ceil(K / 128)] with strides (1, M).
        b: E4M3 [N, K], contiguous; N and K are multiples of 16.
        b_scale_inv: like `a_scale_inv`, for N rows, or from block="128x128": FP32 [ceil(N / 128), blocks],
            contiguous, with blocks = ceil(K / 128) padded to a multiple of 4.
        out_dtype: bf16, fp16 or FP32.

    Raises:
        ValueError: if shapes, dtypes, strides or devices do not fit.
    """
    check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    if (a.dtype, b.dtype) != (DTYPE, DTYPE):
        raise ValueError(f"a is {a.dtype} and b {b.dtype}; GEMMs with scaled blocks take {DTYPE} only")
    if m % ALIGNMENT:
        raise ValueError(
            f"a [M, K] is {tuple(a.shape)}; GEMMs with scaled blocks need a multiple of {ALIGNMENT} rows: "
            "pad the tokens, or keep this layer in bf16"
        )
    if m:
        _check_scales("a_scale_inv", a_scale_inv, a, (m, cdiv(k, BLOCK)), (1, m))
    if b_scale_inv.shape[:1] == (n,):
        _check_scales("b_scale_inv", b_scale_inv, b, (n, cdiv(k, BLOCK)), (1, n))
    else:
        blocks = padded_blocks(k)
        _check_scales("b_scale_inv", b_scale_inv, b, (cdiv(n, BLOCK), blocks), (blocks, 1))
    out = a.new_empty(m, n, dtype=out_dtype)
    if m:
        _block_scaled_mm(a, b, a_scale_inv, b_scale_inv, out)
    return out


def _check_scales(
    name: str, scale_inv: Tensor, of: Tensor, shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    found = (scale_inv.dtype, scale_inv.device, tuple(scale_inv.shape), scale_inv.stride())
    if found != (torch.float32, of.device, shape, strides):
        raise ValueError(
            f"{name} is {scale_inv.dtype} {tuple(scale_inv.shape)} with strides {scale_inv.stride()} on "
            f"{scale_inv.device}; for a matrix {tuple(of.shape)} it has to be FP32 {shape} with strides "
            f"{strides} on {of.device}, as block_cast returns it"
        )
