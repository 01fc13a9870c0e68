"""Gradient of an embedding into its FP32 accumulator, without a gradient of the size of the table.

    sum of row r = dy[t1] + dy[t2] + ...         FP32, over the tokens whose id is r, in their order
    target[r]    = sum                           the first time; rows without tokens become 0
    target[r]   += sum                           later; rows without tokens are not touched

Every row is written once, by programs of its own, so the result is deterministic and does not depend on how
ids are distributed.  Tokens come to their rows by a stable sort of the ids; no kernel adds with atomics, and
the host does not wait for the number of different ids.  Up to `MOST_RANKED` tokens the sort is a count: each
token's place is the number of tokens before it in the order of (id, token).  That compares all pairs, which
takes less time than the many launches of a radix sort.

Bytes for n tokens of which m differ, h columns, dy of p bytes: n h p, and 4 m h the first time (after 4 bytes
an element of the table, to clear it) or 8 m h later; the sort moves little in comparison.
"""

from __future__ import annotations

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import check_input, starts_early
from flatfsdp.kernels._tiles import Tile, find, power_of_two
from flatfsdp.kernels._triton import cdiv, jit, on_device_of, tl
from torch import Tensor

ID_DTYPES = (torch.int64, torch.int32)
RUN = 32
"""Sorted ids that are looked at together, for the end of a run of equal ones."""
MOST_RANKED = 16384
"""Tokens; the pairs of more would take longer than a sort."""
LARGEST_ID = 2**31 - 2**25
"""Integers from -1 up to here are in the order of the FP32 numbers whose bits are 2**23 more: -1 is then the
only one below the normal numbers, and none is infinity or NaN."""


def tile(dtype: torch.dtype, cols: int) -> Tile:
    """A row, or a part of it."""
    block = find("embedding_grad", dtype, cols)
    width = min(block.cols, max(32, power_of_two(cols)))
    return block._replace(cols=width, warps=min(block.warps, max(1, width // 256)))


def reference(target: Tensor, dy: Tensor, ids: Tensor, padding_idx: int | None, first: bool) -> None:
    kept = ids >= 0
    if padding_idx is not None:
        kept &= ids != padding_idx
    dy, ids = dy[kept], ids[kept]
    rows, position = ids.long().unique(return_inverse=True)
    # On the CPU this adds one token after the other.
    sums = target.new_zeros(len(rows), target.shape[1]).index_add_(0, position, dy.float())
    if first:
        target.zero_().index_copy_(0, rows, sums)
    else:
        target.index_add_(0, rows, sums)


@jit
def _load_ids(ids_ptr, index, n):
    """As FP32 numbers in the same order, which the GPU compares faster; beyond the end larger than all."""
    ids = tl.load(ids_ptr + index, index < n, 2**31 - 2**25)
    return (ids.to(tl.int32) + 2**23).to(tl.float32, bitcast=True)


@jit
def _rank_kernel(
    ids_ptr,
    sorted_ptr,
    tokens_ptr,
    n,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Stores each id, and its token, at the place that it has when sorted."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * BLOCK_TOKENS
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    row = _load_ids(ids_ptr, token, n)
    # Equal ids count if they come before.  In most blocks all of them do, or none.
    middle = first // BLOCK_OTHERS * BLOCK_OTHERS
    other = (middle + tl.arange(0, BLOCK_OTHERS))[None, :]
    other_row = _load_ids(ids_ptr, other, n)
    is_before = (other_row < row) | ((other_row == row) & (other < token))
    before = is_before.to(tl.float32)
    for start in tl.range(0, middle, BLOCK_OTHERS, num_stages=STAGES):
        other = (start + tl.arange(0, BLOCK_OTHERS))[None, :]
        before += (_load_ids(ids_ptr, other, n) <= row).to(tl.float32)
    for start in tl.range(middle + BLOCK_OTHERS, n, BLOCK_OTHERS, num_stages=STAGES):
        other = (start + tl.arange(0, BLOCK_OTHERS))[None, :]
        before += (_load_ids(ids_ptr, other, n) < row).to(tl.float32)
    place = tl.sum(before, axis=1, keep_dims=True).to(tl.int32)
    tl.store(sorted_ptr + place, row.to(tl.int32, bitcast=True) - 2**23, token < n)
    tl.store(tokens_ptr + place, token, token < n)


def sort_ids(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The ids in ascending order, int32, and their tokens; equal ids keep the order of their tokens."""
    n = len(ids)
    if n > MOST_RANKED or vocabulary > LARGEST_ID:
        # Half the passes of a sort of 64-bit numbers.
        values, tokens = ids.int().sort(stable=True)
        return values, tokens
    sorted_ids, tokens = (ids.new_empty(n, dtype=torch.int32) for _ in range(2))
    tile, is_early = find("embedding_grad, sort", ids.dtype, n), starts_early(ids.device)
    with on_device_of(ids):
        _rank_kernel[(cdiv(n, tile.rows),)](
            *(ids, sorted_ids, tokens, n, tile.rows, tile.cols, tile.stages, is_early),
            **tile.options,
            launch_pdl=is_early,
        )
    return sorted_ids, tokens


@jit
def _end_of_run(ids_ptr, begin, n, row, RUN: tl.constexpr):
    """Where the ids after `begin` that equal `row` end; they are sorted."""
    end = begin + 1
    equal = RUN
    while equal == RUN:
        index = end + tl.arange(0, RUN)
        equal = tl.sum((tl.load(ids_ptr + index, index < n, -1) == row).to(tl.int32))
        end += equal
    return end


@jit
def _embedding_kernel(
    target_ptr,
    dy_ptr,
    ids_ptr,
    tokens_ptr,
    n,
    padding_idx,
    cols,
    FIRST: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
    RUN: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    across = tl.cdiv(cols, BLOCK_COLS)
    begin = tl.program_id(0) // across
    row = tl.load(ids_ptr + begin)
    token = tl.load(tokens_ptr + begin).to(tl.int64)
    # Never so for ids of -1, which come first.
    is_first_of_row = row != tl.load(ids_ptr + begin - 1, begin > 0, -1)
    if is_first_of_row & (row != padding_idx):
        col = (tl.program_id(0) % across) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        at_row = target_ptr + row.to(tl.int64) * cols + col
        if not FIRST:
            old = tl.load(at_row, mask, 0.0)
        # The first token by itself: most ids occur once, and nothing then waits for the end of their run.
        total = tl.load(dy_ptr + token * cols + col, mask, 0.0).to(tl.float32)
        for at in tl.range(begin + 1, _end_of_run(ids_ptr, begin, n, row, RUN), num_stages=STAGES):
            token = tl.load(tokens_ptr + at).to(tl.int64)
            total += tl.load(dy_ptr + token * cols + col, mask, 0.0).to(tl.float32)
        tl.store(at_row, total if FIRST else old + total, mask)


def launch(target: Tensor, dy: Tensor, ids: Tensor, padding_idx: int | None, first: bool) -> None:
    n, cols = dy.shape
    sorted_ids, tokens = sort_ids(ids, len(target))
    block, is_early = tile(dy.dtype, cols), starts_early(target.device)
    if first:
        target.zero_()
    with on_device_of(target):
        _embedding_kernel[(n * cdiv(cols, block.cols),)](
            *(target, dy, sorted_ids, tokens, n, -1 if padding_idx is None else padding_idx),
            *(cols, first, block.cols, block.stages, RUN, is_early),
            **block.options,
            launch_pdl=is_early,
        )


_embedding_grad = operator(
    "embedding_grad_(Tensor(a!) target, Tensor dy, Tensor ids, int? padding_idx, bool first) -> ()",
    reference=reference,
    launch=launch,
)


def embedding_grad(
    target: Tensor, dy: Tensor, ids: Tensor, *, first: bool, padding_idx: int | None = None
) -> None:
    """Writes (`first`) or adds the gradient of an embedding's weight to `target`, in place.

    Args:
        target: FP32 [vocabulary, hidden], contiguous.
        dy: [tokens, hidden], gradient of the embedding's result; FP32, fp16 or bf16, contiguous.
        ids: int64 or int32 [tokens], each below `vocabulary`, as the forward has checked, and at least 0; or
            -1, for rows that another rank has: these tokens give nothing.
        first: overwrite what the target holds, all of it.
        padding_idx: tokens with this id give nothing.

    Raises:
        ValueError: if a shape, dtype or device does not fit.
    """
    check_input("dy", dy)
    fits = target.dim() == 2 and target.dtype == torch.float32 and target.is_contiguous()
    if not fits or target.shape[1] != dy.shape[1] or target.device != dy.device:
        raise ValueError(
            f"target is {target.dtype} {tuple(target.shape)} on {target.device}; embedding_grad needs it "
            f"contiguous, in FP32, of {dy.shape[1]} columns like dy, on {dy.device}"
        )
    if ids.dtype not in ID_DTYPES or tuple(ids.shape) != (dy.shape[0],) or ids.device != dy.device:
        raise ValueError(
            f"ids is {ids.dtype} {tuple(ids.shape)} on {ids.device}; embedding_grad needs int64 or int32 of "
            f"shape {(dy.shape[0],)} on {dy.device}"
        )
    _embedding_grad(target, dy, ids, padding_idx, first)
