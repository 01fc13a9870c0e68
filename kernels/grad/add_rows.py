"""Addition of several ranks' gradients to one sum, row by row in their order, in one pass.

    target = widen(rows[0]) + widen(rows[1]) + ...            the first time
    target = target + widen(rows[0]) + widen(rows[1]) + ...   later

from the left to the right, with one rounding, in the target's dtype, for each addition.  So the sum has the
bits of k calls of `accumulate`, and does not depend on how many rows come in one call.  One of the rows may
be this rank's own, which nobody has sent: it is read where it is, and rounded to the dtype of the others.

Bytes per element, k rows of p bytes and a target of 4: k p + 4 the first time, k p + 8 later, where k calls
read and write the target k times; the own row has 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.grad.accumulate import accumulate
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.tiles import find
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


def reference(target: Tensor, rows: Tensor, own: Tensor | None, place: int, first: bool) -> None:
    everyones = list(rows)
    if own is not None:
        everyones.insert(place, own.to(rows.dtype))
    for index, row in enumerate(everyones):
        accumulate(target, row, first=first and index == 0)


@jit
def _add_rows_kernel(
    target_ptr,  # [numel], FP32
    own_ptr,  # [numel], FP32: row number OWN
    rows_ptr,  # [all others, numel], FP32, bf16 or fp16, contiguous
    numel,  # elements of the target
    K: tl.constexpr,  # number of rows, the own one included
    OWN: tl.constexpr,  # number of the own row; K if there is none
    FIRST: tl.constexpr,  # overwrite the target
    BLOCK: tl.constexpr,  # elements of one program
):
    """Add one block of all rows."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    total = tl.zeros([BLOCK], tl.float32)
    if not FIRST:
        total = tl.load(target_ptr + offset, mask, 0.0)
    row_ptr = rows_ptr
    for index in tl.static_range(K):
        if index == OWN:
            row = tl.load(own_ptr + offset, mask, 0.0).to(rows_ptr.dtype.element_ty).to(tl.float32)
        else:
            row = tl.load(row_ptr + offset, mask, 0.0).to(tl.float32)
            row_ptr += numel
        # Not 0 + row the first time, which would turn -0.0 into 0.0.
        total = row if FIRST and index == 0 else total + row
    tl.store(target_ptr + offset, total, mask)


def launch(target: Tensor, rows: Tensor, own: Tensor | None, place: int, first: bool) -> None:
    if target.dtype != torch.float32 or (own is not None and own.dtype != torch.float32):
        reference(target, rows, own, place, first)
        return
    k, place = (len(rows), len(rows)) if own is None else (1 + len(rows), place)
    _prepared(target.numel(), k, place, first)(target, target if own is None else own, rows)


@for_each_shape
def _prepared(numel: int, k: int, place: int, first: bool) -> PreparedKernel:
    # As many elements at a time as in the addition of small gradients.
    tile = find("accumulate_many", torch.bfloat16, 1)
    grid = (cdiv(numel, tile.cols),)
    return PreparedKernel(_add_rows_kernel, grid, numel, k, place, first, tile.cols, **tile.options)


_add_rows = operator(
    "add_rows_(Tensor(a!) target, Tensor rows, Tensor? own, int place, bool first) -> ()",
    reference=reference,
    launch=launch,
)


def add_rows(target: Tensor, rows: Tensor, own: Tensor | None = None, place: int = 0, *, first: bool) -> None:
    """Write (`first`) or add rows to a target in place, one after the other: one launch on CUDA.

    Args:
        target: [n], contiguous.
        rows: [k, n], contiguous, on the target's device; dtype at most as wide as the target's.
        own: one more row, [n], contiguous, of the target's dtype; it is rounded to that of `rows`.
        place: number of rows before it, at most k.
        first: True overwrites the target, False adds.

    Raises:
        ValueError: if a shape or layout does not fit, or there is no row.
    """
    fits = rows.dim() == 2 and rows.shape[1:] == target.shape and rows.device == target.device
    if own is None:
        fits = fits and len(rows) > 0
    else:
        fits = fits and own.shape == target.shape and own.is_contiguous() and 0 <= place <= len(rows)
    if not fits or not rows.is_contiguous() or not target.is_contiguous():
        raise ValueError(
            f"add_rows got rows {tuple(rows.shape)} on {rows.device}, of its own "
            f"{None if own is None else tuple(own.shape)} at {place}, for a target {tuple(target.shape)} on "
            f"{target.device}; it needs contiguous rows [k, n] for a contiguous target [n] on one device"
        )
    _add_rows(target, rows, own, place, first)
