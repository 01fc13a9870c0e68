"""The gradient of an embedding, added to its accumulator without a gradient of the table's size.

    sum of row r = dy[t1] + dy[t2] + ...         FP32, over the tokens whose id is r, in their order
    target[r]    = sum                           the first time; rows without tokens become 0
    target[r]   += sum                           later; rows without tokens are not touched

The target is FP32, or bf16 for the gradient of one microbatch, and then rounds the sum of a row once.  Every
row is written once, by its own programs, so the result is deterministic and does not depend on how ids are
distributed.  A stable sort of the ids brings tokens to their rows; no kernel adds with atomics, and the
host does not wait for the number of distinct ids.  Up to `MOST_RANKED` tokens the sort is a count: each
token's place is the number of tokens before it in the order of (id, token).  This compares all pairs, which
takes less time than the many launches of a radix sort.

Bytes for n tokens with m distinct ids, h columns, dy of p and target of a bytes: n h p, and a m h the first
time (after a bytes per element of the table, to clear it) or 2 a m h later; the sort moves little in
comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.grad.accumulate import TARGET_DTYPES
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import check_input, starts_early
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import cdiv, jit, on_device_of, tl

ID_DTYPES = (torch.int64, torch.int32)
BLOCK_IDS = 32
"""Number of sorted ids that are read together to find the end of a run of equal ones."""
MOST_RANKED = 16384
"""Largest number of tokens sorted by a count; for more, comparing all pairs takes longer than a sort."""
LARGEST_ID = 2**19 - 2
"""Largest id that a count sorts: FP32 numbers distinguish ids from -1 to here (`_rank_kernel`)."""


def tile(dtype: torch.dtype, cols: int) -> Tile:
    """The tile of a row, or of a part of it."""
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
    sums = dy.new_zeros(len(rows), dy.shape[1], dtype=torch.float32).index_add_(0, position, dy.float())
    if first:
        target.zero_()
    else:
        sums += target[rows]
    target[rows] = sums.to(target.dtype)


@jit
def _number(ids, shift):
    """Map ids to FP32 numbers in [1, 2], larger for smaller ids; adjacent ids are 2**-19 apart.

    A `shift` of 16 gives the number of the next smaller id.
    """
    return (0x40000000 - 32 + shift - 16 * ids.to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def _rank_kernel(
    ids_ptr,  # id of each token [n], int64 or int32
    sorted_ptr,  # ids in ascending order [n], int32
    tokens_ptr,  # tokens of the sorted ids [n], int32
    n,  # number of tokens
    BLOCK_TOKENS: tl.constexpr,  # tokens that one program places
    BLOCK_OTHERS: tl.constexpr,  # tokens that they are compared with at a time
    STEPS: tl.constexpr,  # such blocks in an unrolled round
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
):
    """Store each id, and its token, at its place in the sorted order.

    A pair costs one instruction, a multiply-add.  `scale` is 0.5 divided by the midpoint between the number
    of an id and that of the next smaller one.  Numbers of smaller ids times `scale` are above 0.5, those of
    other ids below. Added to 2**23, above which FP32 numbers are whole, they round to 1 or 0.  (Rounding of
    `scale` and of the multiplications takes less than two thirds of the distance.)
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * BLOCK_TOKENS
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    row = tl.load(ids_ptr + token, token < n, 0).to(tl.int32)
    scale = 0.5 / (_number(row, 0) + 2**-20)
    middle = first // BLOCK_OTHERS * BLOCK_OTHERS
    count = tl.full([BLOCK_TOKENS, BLOCK_OTHERS], 2.0**23, tl.float32)
    for start in tl.range(0, n, BLOCK_OTHERS * STEPS):
        for step in tl.static_range(STEPS):
            begin = start + step * BLOCK_OTHERS
            other = (begin + tl.arange(0, BLOCK_OTHERS))[None, :]
            ids = tl.load(ids_ptr + other, other < n, 2**19 - 2)
            # Before the middle block equal ids count, too: all of them are treated as the next smaller ones.
            count += _number(ids, min(max(middle - begin, 0), 16)) * scale
    before = count.to(tl.int32, bitcast=True) - 0x4B000000
    # In the middle block only some of the equal ones count.
    other = (middle + tl.arange(0, BLOCK_OTHERS))[None, :]
    is_equal = tl.load(ids_ptr + other, other < n, -1).to(tl.int32) == row
    before += (is_equal & (other < token)).to(tl.int32)
    place = tl.sum(before, axis=1, keep_dims=True)
    tl.store(sorted_ptr + place, row, token < n)
    tl.store(tokens_ptr + place, token, token < n)


def sort_ids(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The ids in ascending order, int32, and their tokens; equal ids keep the order of their tokens."""
    n = len(ids)
    if n > MOST_RANKED or vocabulary > LARGEST_ID:
        # int32 halves the passes of a sort of 64-bit numbers.
        values, tokens = ids.int().sort(stable=True)
        return values, tokens
    sorted_ids, tokens = (ids.new_empty(n, dtype=torch.int32) for _ in range(2))
    tile, is_early = find("embedding_grad, sort", ids.dtype, n), starts_early(ids.device)
    with on_device_of(ids):
        _rank_kernel[(cdiv(n, tile.rows),)](
            *(ids, sorted_ids, tokens, n, tile.rows, tile.cols, tile.steps, is_early),
            **tile.options,
            launch_pdl=is_early,
        )
    return sorted_ids, tokens


@jit
def _end_of_run(ids_ptr, begin, n, row, BLOCK_IDS: tl.constexpr):
    """The index after the last of the sorted ids that follow `begin` and equal `row`."""
    end = begin + 1
    equal = BLOCK_IDS
    while equal == BLOCK_IDS:
        index = end + tl.arange(0, BLOCK_IDS)
        equal = tl.sum((tl.load(ids_ptr + index, index < n, -1) == row).to(tl.int32))
        end += equal
    return end


@jit
def _embedding_kernel(
    target_ptr,  # gradient of the table [vocabulary, cols], FP32 or bf16
    dy_ptr,  # gradient of the result [n, cols], FP32, fp16 or bf16
    ids_ptr,  # ids in ascending order [n], int32
    tokens_ptr,  # tokens of the sorted ids [n]: int32, or int64 from PyTorch's sort
    n,  # number of tokens
    padding_idx,  # id that gives nothing; -1: there is none
    cols,
    FIRST: tl.constexpr,  # overwrite the rows of the target; otherwise add to them
    BLOCK_COLS: tl.constexpr,  # columns of one program; each sorted id has programs of its own
    STAGES: tl.constexpr,  # tokens on their way from memory at a time
    BLOCK_IDS: tl.constexpr,  # sorted ids that are looked at together
    IS_EARLY: tl.constexpr,  # launched by PDL: wait for the kernel before
):
    """Write or add a part of one row, if the program's token is the first of its id; otherwise do nothing."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    across = tl.cdiv(cols, BLOCK_COLS)
    begin = tl.program_id(0) // across
    row = tl.load(ids_ptr + begin)
    token = tl.load(tokens_ptr + begin).to(tl.int64)
    # This is never true for ids of -1, which come first.
    is_first_of_row = row != tl.load(ids_ptr + begin - 1, begin > 0, -1)
    if is_first_of_row & (row != padding_idx):
        col = (tl.program_id(0) % across) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        at_row = target_ptr + row.to(tl.int64) * cols + col
        if not FIRST:
            old = tl.load(at_row, mask, 0.0).to(tl.float32)
        # The first token is separate: most ids occur once, and then nothing waits for the end of their run.
        total = tl.load(dy_ptr + token * cols + col, mask, 0.0).to(tl.float32)
        if row == tl.load(ids_ptr + begin + 1, begin + 1 < n, -1):
            for at in tl.range(begin + 1, _end_of_run(ids_ptr, begin, n, row, BLOCK_IDS), num_stages=STAGES):
                token = tl.load(tokens_ptr + at).to(tl.int64)
                total += tl.load(dy_ptr + token * cols + col, mask, 0.0).to(tl.float32)
        tl.store(at_row, (total if FIRST else old + total).to(target_ptr.dtype.element_ty), mask)


def launch(target: Tensor, dy: Tensor, ids: Tensor, padding_idx: int | None, first: bool) -> None:
    n, cols = dy.shape
    sorted_ids, tokens = sort_ids(ids, len(target))
    block, is_early = tile(dy.dtype, cols), starts_early(target.device)
    if first:
        target.zero_()
    with on_device_of(target):
        _embedding_kernel[(n * cdiv(cols, block.cols),)](
            *(target, dy, sorted_ids, tokens, n, -1 if padding_idx is None else padding_idx),
            *(cols, first, block.cols, block.stages, BLOCK_IDS, is_early),
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
    """Write (`first`) or add the gradient of an embedding's weight to `target`, in place.

    Args:
        target: FP32 or bf16 [vocabulary, hidden], contiguous; a row's FP32 sum is rounded once to bf16.
        dy: [tokens, hidden], gradient of the embedding's result; FP32, fp16 or bf16, contiguous.
        ids: int64 or int32 [tokens], each below `vocabulary`, as the forward has checked, and at least 0; or
            -1, for rows that another rank has: these tokens give nothing.
        first: overwrite what the target holds, all of it.
        padding_idx: tokens with this id give nothing.

    Raises:
        ValueError: if a shape, dtype or device does not fit.
    """
    check_input("dy", dy)
    fits = target.dim() == 2 and target.dtype in TARGET_DTYPES and target.is_contiguous()
    if not fits or target.shape[1] != dy.shape[1] or target.device != dy.device:
        raise ValueError(
            f"target is {target.dtype} {tuple(target.shape)} on {target.device}; embedding_grad needs it "
            f"contiguous, in FP32 or bf16, of {dy.shape[1]} columns like dy, on {dy.device}"
        )
    if ids.dtype not in ID_DTYPES or tuple(ids.shape) != (dy.shape[0],) or ids.device != dy.device:
        raise ValueError(
            f"ids is {ids.dtype} {tuple(ids.shape)} on {ids.device}; embedding_grad needs int64 or int32 of "
            f"shape {(dy.shape[0],)} on {dy.device}"
        )
    _embedding_grad(target, dy, ids, padding_idx, first)
