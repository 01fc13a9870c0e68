"""Cross-entropy of a large vocabulary, without FP32 logits: statistics forward, the gradient backward.

        max    = max x                          FP32, over this rank's part of a token's row of logits
        sum    = sum of exp(x - max)
        target = x[target]                      0 if the target is in another part
        loss   = (max - target) + log(sum)      with max and sum of the whole vocabulary
    dx     = (exp((x - max) - log(sum)) - [target]) * scale;  0 for tokens that are ignored

This order, instead of max + log(sum), keeps the digits of small losses of nearly certain tokens.

The maximum and the sum come from one pass (online softmax, arXiv:1805.02867): 8 or 4 neighbours, loaded
together by a thread, share a running maximum, and the running sum is rescaled when it rises.  A program
processes one token, so no result depends on the order of programs.  All arithmetic is in FP32.

A row with infinity or NaN has NaN as its sum, and `max` is meaningless then; a part of a row with nothing but
-infinity has the lowest FP32 number as its maximum and 0 as its sum, so that other parts decide.

Bytes per element, logits of p bytes: p for the statistics, 2 p for the gradient, in place or not.

Arguments shared by both kernels:

    logits_ptr    this part's logits [tokens, cols], FP32, fp16 or bf16
    targets_ptr   id of each token's target in the whole vocabulary [tokens], int64
    first         id of the first column
    VECTOR        elements in 16 bytes
        IS_SHIFTED    rows do not begin at multiples of 16 bytes: read them in whole vectors (`is_shifted`)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import check_input, check_like, vector_of
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import cdiv, jit, on_device_of, tl

LOWEST = torch.finfo(torch.float32).min
"""Lowest FP32 number: the maximum of a row without a number above -infinity."""


def tile(kernel: str, dtype: torch.dtype, cols: int) -> Tile:
    """The tile of a row, or of a part of it."""
    block = find(kernel, dtype, cols)
    width = min(block.cols, max(256, power_of_two(cols)))
    return block._replace(cols=width, warps=min(block.warps, width // 256))


def is_shifted(*tensors: Tensor) -> bool:
    """Whether rows of these equal-shaped tensors begin inside 16-byte vectors that cover all bytes.

    Each row is then read from the vector in which it begins to the one in which it ends.
    """
    vector, cols = vector_of(tensors[0]), tensors[0].shape[1]
    are_whole = all(tensor.numel() % vector == 0 and tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return cols % vector != 0 and are_whole


def statistics_reference(logits: Tensor, targets: Tensor, first: int, out: Tensor) -> None:
    x = logits.float()
    largest = x.amax(1, keepdim=True).clamp_(min=LOWEST)
    index = (targets - first)[:, None]
    is_here = (index >= 0) & (index < logits.shape[1])
    target = x.gather(1, index.where(is_here, 0)).where(is_here, 0.0)
    total = (x - largest).exp_().sum(1, keepdim=True)
    out.copy_(torch.cat((largest, total, target), 1).t())


@jit
def _exp(x):
    """Compute e^x in one instruction and a multiplication; `tl.exp` takes five, for results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def _is_read(at, end, VECTOR: tl.constexpr, IS_SHIFTED: tl.constexpr):
    """Mask of the elements before the end of a row, or of those whose vectors begin before it."""
    return (at // VECTOR * VECTOR if IS_SHIFTED else at) < end


@jit
def _statistics_kernel(
    logits_ptr,
    targets_ptr,
    out_ptr,  # max, sum and target of each token [3, tokens], FP32
    tokens,
    cols,
    first,
    BLOCK_COLS: tl.constexpr,  # columns that a program, which takes a whole row, reads at a time
    VECTOR: tl.constexpr,
    IS_SHIFTED: tl.constexpr,
    STAGES: tl.constexpr,  # blocks of columns on their way from memory at a time
):
    """Store the statistics of one token."""
    token = tl.program_id(0).to(tl.int64)
    begin = token * cols
    shift = (begin % VECTOR).to(tl.int32) if IS_SHIFTED else 0
    end = cols + shift
    row_ptr = logits_ptr + (begin // VECTOR * VECTOR if IS_SHIFTED else begin)
    # The lowest number: -infinity minus itself would be NaN.
    largest = tl.full([BLOCK_COLS // VECTOR], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK_COLS // VECTOR], tl.float32)
    for start in tl.range(0, end, BLOCK_COLS, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(row_ptr + at, _is_read(at, end, VECTOR, IS_SHIFTED), float("-inf")).to(tl.float32)
        if IS_SHIFTED:
            x = tl.where((at >= shift) & (at < end), x, float("-inf"))
        x = tl.reshape(x, [BLOCK_COLS // VECTOR, VECTOR])
        raised = tl.maximum(largest, tl.max(x, axis=1))
        total = total * _exp(largest - raised) + tl.sum(_exp(x - raised[:, None]), axis=1)
        largest = raised
    row_max = tl.max(largest, axis=0)
    tl.store(out_ptr + token, row_max)
    tl.store(out_ptr + tokens + token, tl.sum(total * _exp(largest - row_max), axis=0))
    index = tl.load(targets_ptr + token) - first
    target = tl.load(logits_ptr + begin + index, (index >= 0) & (index < cols), 0.0)
    tl.store(out_ptr + 2 * tokens + token, target.to(tl.float32))


def statistics_launch(logits: Tensor, targets: Tensor, first: int, out: Tensor) -> None:
    tokens, cols = logits.shape
    if tokens == 0:
        return
    block = tile("cross_entropy_statistics", logits.dtype, cols)
    with on_device_of(logits):
        _statistics_kernel[(tokens,)](
            *(logits, targets, out, tokens, cols, first),
            *(block.cols, vector_of(logits), is_shifted(logits), block.stages),
            **block.options,
        )


_statistics = operator(
    "cross_entropy_statistics_(Tensor logits, Tensor targets, int first, Tensor(a!) out) -> ()",
    reference=statistics_reference,
    launch=statistics_launch,
)


def grad_reference(
    out: Tensor,
    logits: Tensor | None,
    targets: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    first: int,
    ignore_index: int,
) -> None:
    source = out if logits is None else logits
    grad = (source.float() - largest[:, None]).sub_(log_sum[:, None]).exp_()
    index = targets - first
    (rows,) = torch.where((index >= 0) & (index < out.shape[1]))
    grad[rows, index[rows]] -= 1
    grad.mul_(scale[:, None])
    out.copy_(grad.masked_fill_((targets == ignore_index)[:, None], 0.0))


@jit
def _grad_kernel(
    out_ptr,  # gradient [tokens, cols], the logits' dtype; may be the logits themselves
    logits_ptr,
    targets_ptr,
    largest_ptr,  # max of the whole vocabulary [tokens], FP32
    log_sum_ptr,  # log(sum) of the whole vocabulary [tokens], FP32
    scale_ptr,  # gradient of each token's loss [tokens], FP32
    cols,
    first,
    ignore_index,  # tokens with this target get 0
    across,  # programs of a row
    BLOCK_COLS: tl.constexpr,  # columns of one program
    VECTOR: tl.constexpr,
    IS_SHIFTED: tl.constexpr,
):
    """Store the gradient of a part of one token's logits."""
    token = tl.program_id(0) // across
    begin = token.to(tl.int64) * cols
    shift = (begin % VECTOR).to(tl.int32) if IS_SHIFTED else 0
    end = cols + shift
    row = begin // VECTOR * VECTOR if IS_SHIFTED else begin
    start = (tl.program_id(0) % across) * BLOCK_COLS
    at = start + tl.arange(0, BLOCK_COLS)
    target = tl.load(targets_ptr + token)
    if target == ignore_index:
        grad = tl.zeros([BLOCK_COLS], tl.float32)
    else:
        x = tl.load(logits_ptr + row + at, _is_read(at, end, VECTOR, IS_SHIFTED), 0.0).to(tl.float32)
        x -= tl.load(largest_ptr + token)
        here = (target - first).to(tl.int32) + shift
        grad = _exp(x - tl.load(log_sum_ptr + token)) - (at == here).to(tl.float32)
        grad *= tl.load(scale_ptr + token)
    grad = grad.to(out_ptr.dtype.element_ty)
    if IS_SHIFTED:
        # Vectors shared with the rows before and after are written element by element.
        vector = at // VECTOR * VECTOR
        is_whole = (vector >= shift) & (vector + VECTOR <= end)
        tl.store(out_ptr + row + at, grad, is_whole)
        if (start == 0) | (start + BLOCK_COLS > end):
            tl.store(out_ptr + row + at, grad, ~is_whole & (at >= shift) & (at < end))
    else:
        tl.store(out_ptr + row + at, grad, at < end)


def grad_launch(
    out: Tensor,
    logits: Tensor | None,
    targets: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    first: int,
    ignore_index: int,
) -> None:
    tokens, cols = out.shape
    if tokens == 0:
        return
    block = tile("cross_entropy_grad", out.dtype, cols)
    source = out if logits is None else logits
    shifted = is_shifted(out, source)
    vector = vector_of(out)
    across = cdiv(cols + (vector - 1 if shifted else 0), block.cols)
    with on_device_of(out):
        _grad_kernel[(tokens * across,)](
            *(out, source, targets, largest, log_sum, scale, cols, first, ignore_index, across),
            *(block.cols, vector, shifted),
            **block.options,
        )


_grad = operator(
    "cross_entropy_grad_(Tensor(a!) out, Tensor? logits, Tensor targets, Tensor largest, "
    "Tensor log_sum, Tensor scale, int first, int ignore_index) -> ()",
    reference=grad_reference,
    launch=grad_launch,
)


class Statistics(NamedTuple):
    """Statistics of a part of the vocabulary, FP32 [tokens] each; the loss is computed from them."""

    max: Tensor
    sum: Tensor
    target: Tensor

    @property
    def loss(self) -> Tensor:
        """The loss of each token, if the part is the whole vocabulary."""
        return (self.max - self.target) + self.sum.log()


def cross_entropy_statistics(logits: Tensor, targets: Tensor, *, first: int = 0) -> Tensor:
    """Maximum, sum and target logit of each token, FP32 [3, tokens], in the order of `Statistics`.

    Args:
        logits: FP32, fp16 or bf16 [tokens, vocabulary], or a part of the columns; contiguous.
        targets: int64 [tokens], ids of the whole vocabulary; for others (such as -100) the target logit is 0.
        first: id of the first column.

    Raises:
        ValueError: if a shape, dtype or device does not fit.
    """
    _check("cross_entropy_statistics", logits, targets)
    out = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
    _statistics(logits, targets, first, out)
    return out


def cross_entropy_grad(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    *,
    first: int = 0,
    ignore_index: int = -100,
    inplace: bool = False,
) -> Tensor:
    """Gradient with respect to the logits, [tokens, vocabulary] in their dtype.

    Args:
        logits: FP32, fp16 or bf16 [tokens, vocabulary], or a part of the columns; contiguous.
        targets: int64 [tokens], ids of the whole vocabulary.
        largest: FP32 [tokens]: max over the whole vocabulary.
        log_sum: FP32 [tokens]: log(sum) over the whole vocabulary.
        scale: FP32 [tokens], gradient of each token's loss.
        first: id of the first column.
        ignore_index: tokens with this target get 0, whatever their logits are.
        inplace: write the gradient over the logits, and return them.

    Raises:
        ValueError: if a shape, dtype or device does not fit.
    """
    _check("cross_entropy_grad", logits, targets)
    for name, tensor in (("largest", largest), ("log_sum", log_sum), ("scale", scale)):
        check_like(name, tensor, logits, (logits.shape[0],), torch.float32)
    if not inplace:
        out = torch.empty_like(logits)
        _grad(out, logits, targets, largest, log_sum, scale, first, ignore_index)
        return out
    _grad(logits, None, targets, largest, log_sum, scale, first, ignore_index)
    # Autograd does not see what a kernel writes; this makes it refuse further uses of these logits.
    torch.autograd.graph.increment_version(logits)
    return logits


def _check(function: str, logits: Tensor, targets: Tensor) -> None:
    check_input("logits", logits)
    if logits.shape[1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; {function} needs a column at least")
    shape = (logits.shape[0],)
    fits = targets.dtype == torch.int64 and tuple(targets.shape) == shape and targets.is_contiguous()
    if not fits or targets.device != logits.device:
        raise ValueError(
            f"targets is {targets.dtype} {tuple(targets.shape)} on {targets.device}; {function} needs it "
            f"contiguous, int64 of shape {shape} on {logits.device}"
        )
