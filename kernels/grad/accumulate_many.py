"""Addition of many parameters' gradients to their slices of the flat FP32 buffer, in one launch.

For each of n tensors, as `accumulate` does for one:

    target  = widen(grad)             the first time
    target += widen(grad)             later

Weights whose GEMM accumulates in place do not need this.  It handles norm weights and biases of a few
kilobytes each, for which a launch costs more than the copy.

Bytes per element, grad of p bytes: 4 + p the first time, 8 + p later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.kernels.grad.accumulate import accumulate
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.tables import are_aligned, first_blocks, kept_table, tensor_of_block
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients; the table holds their index here."""


def reference(like: Tensor, targets: list[Tensor], grads: list[Tensor], first: list[bool]) -> None:
    for target, grad, is_first in zip(targets, grads, first, strict=True):
        accumulate(target, grad, first=is_first)


@jit
def _accumulate_block(
    target_ptr,  # target, FP32
    wide_ptr,  # gradient, read as FP32 if it is
    narrow_ptr,  # the same address, read as 16-bit numbers if it is bf16 or fp16
    dtype,  # of the gradient, as an index into DTYPES
    is_first,  # 1: overwrite the target, 0: add
    offset,  # of the block's elements in the tensor
    mask,  # elements of the block that the tensor has
):
    """Write or add one block of a gradient."""
    wide = tl.load(wide_ptr + offset, mask & (dtype == 0), 0.0)
    narrow = tl.load(narrow_ptr + offset, mask & (dtype != 0), 0)
    as_bf16 = narrow.to(tl.bfloat16, bitcast=True).to(tl.float32)
    as_fp16 = narrow.to(tl.float16, bitcast=True).to(tl.float32)
    grad = tl.where(dtype == 0, wide, tl.where(dtype == 1, as_bf16, as_fp16))
    old = tl.load(target_ptr + offset, mask & (is_first == 0), 0.0)
    # Not 0 + grad, which would turn -0.0 into 0.0.
    tl.store(target_ptr + offset, tl.where(is_first != 0, grad, old + grad), mask)


@jit
def _accumulate_many_kernel(
    table_ptr,  # [6, n], int64: number of first block, target, gradient, elements, index in DTYPES, is_first
    n,  # number of tensors
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    ALIGNED: tl.constexpr,  # all addresses are multiples of 16
    BLOCK: tl.constexpr,  # elements of one program
):
    """Write or add one block of one gradient."""
    block = tl.program_id(0)
    row_ptr = table_ptr + tensor_of_block(table_ptr, n, block, N_POW2)
    start = (block - tl.load(row_ptr)) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    target_ptr = tl.load(row_ptr + n).to(tl.pointer_type(tl.float32))
    # A gradient is read through one of the two: four bytes per element, or two.
    wide_ptr = tl.load(row_ptr + 2 * n).to(tl.pointer_type(tl.float32))
    narrow_ptr = tl.load(row_ptr + 2 * n).to(tl.pointer_type(tl.int16))
    if ALIGNED:
        # Triton derives this for arguments, but not for loaded addresses.
        target_ptr = tl.multiple_of(target_ptr, 16)
        wide_ptr = tl.multiple_of(wide_ptr, 16)
        narrow_ptr = tl.multiple_of(narrow_ptr, 16)
    numel = tl.load(row_ptr + 3 * n)
    dtype = tl.load(row_ptr + 4 * n)
    is_first = tl.load(row_ptr + 5 * n)
    if start + BLOCK <= numel:
        # With a uniform mask, loads are as wide as possible.
        inside = tl.full([BLOCK], 1, tl.int1)
        _accumulate_block(target_ptr, wide_ptr, narrow_ptr, dtype, is_first, offset, inside)
    else:
        _accumulate_block(target_ptr, wide_ptr, narrow_ptr, dtype, is_first, offset, offset < numel)


def launch(like: Tensor, targets: list[Tensor], grads: list[Tensor], first: list[bool]) -> None:
    tile = find("accumulate_many", torch.bfloat16, 1)
    sizes = [target.numel() for target in targets]
    starts, blocks = first_blocks([cdiv(size, tile.cols) for size in sizes])
    fields = [
        starts,
        [target.data_ptr() for target in targets],
        [grad.data_ptr() for grad in grads],
        sizes,
        [DTYPES.index(grad.dtype) for grad in grads],
        [int(is_first) for is_first in first],
    ]
    start = _prepared(blocks, len(targets), are_aligned(*fields[1:3]), tile)
    start(kept_table(fields, like.device))


@for_each_shape
def _prepared(blocks: int, n: int, aligned: bool, tile: Tile) -> PreparedKernel:
    return PreparedKernel(
        _accumulate_many_kernel, (blocks,), *(n, power_of_two(n), aligned, tile.cols), **tile.options
    )


# `like` exists for the dispatch, which reads the first argument.
_accumulate_many = operator(
    "accumulate_many_(Tensor like, Tensor(a!)[] targets, Tensor[] grads, bool[] first) -> ()",
    reference=reference,
    launch=launch,
)


def accumulate_many(targets: Sequence[Tensor], grads: Sequence[Tensor], first: Sequence[bool]) -> None:
    """Write or add each gradient to its target, in place: one launch on CUDA.

    Bit-equal to `accumulate` on each pair.

    Args:
        targets: FP32, contiguous, disjoint; usually slices of a unit's flat gradient buffer.
        grads: FP32, bf16 or fp16, mixed as they come; each contiguous and of its target's shape and device.
        first: for each pair: True overwrites the target, False adds.

    Raises:
        ValueError: if the lists differ in length, or a tensor's dtype, shape, device or layout does not fit.
    """
    if not len(targets) == len(grads) == len(first):
        raise ValueError(
            f"accumulate_many got {len(targets)} targets, {len(grads)} grads and {len(first)} entries of "
            "first; it needs one of each per parameter"
        )
    if not targets:
        return
    for index, (target, grad) in enumerate(zip(targets, grads, strict=True)):
        _check_pair(index, target, grad, targets[0].device)
    _accumulate_many(targets[0], list(targets), list(grads), list(first))


def _check_pair(index: int, target: Tensor, grad: Tensor, device: torch.device) -> None:
    if target.dtype != torch.float32 or not target.is_contiguous() or target.device != device:
        raise ValueError(
            f"targets[{index}] is {target.dtype} {tuple(target.shape)} on {target.device}; accumulate_many "
            f"needs contiguous FP32 tensors on one device, here {device}"
        )
    fits = grad.shape == target.shape and grad.device == device
    if grad.dtype not in DTYPES or not grad.is_contiguous() or not fits:
        raise ValueError(
            f"grads[{index}] is {grad.dtype} {tuple(grad.shape)} on {grad.device}; accumulate_many needs it "
            f"contiguous, in FP32, bf16 or fp16, and like its target: {tuple(target.shape)} on {device}"
        )
