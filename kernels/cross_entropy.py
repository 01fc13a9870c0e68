"""Cross-entropy of a large vocabulary, without FP32 logits: statistics forward, the gradient backward.

    max    = max x                          FP32, over this rank's part of a token's row of logits
    sum    = sum of exp(x - max)
    target = x[target]                      0 where the target is in another part
    loss   = (max - target) + log(sum)      max and sum of the whole vocabulary
    dx     = (exp((x - max) - log(sum)) - [target]) * scale;  0 for tokens that are ignored

In this order, rather than by way of max + log(sum), the small losses of tokens that are nearly certain keep
their digits.

The maximum and the sum come from one pass (online softmax, arXiv:1805.02867): 8 or 4 neighbours, which a
thread has loaded at once, share a running maximum, and the sum below it is scaled when that rises.  A program
takes a token, so no result depends on the order of programs.  All arithmetic is in FP32.

A row with infinity or NaN has NaN as its sum, and `max` then says nothing; a part of a row with nothing but
-infinity has the lowest FP32 number as its maximum and 0 as its sum, so that other parts decide.

Bytes per element, logits of p bytes: p for the statistics, 2 p for the gradient, in place or not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import check_input, check_like, vector_of
from flatfsdp.kernels._tiles import Tile, find, power_of_two
from flatfsdp.kernels._triton import cdiv, jit, on_device_of, tl
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


def tile(kernel: str, dtype: torch.dtype, cols: int) -> Tile:
    """A row, or a part of it."""
    block = find(kernel, dtype, cols)
    width = min(block.cols, max(256, power_of_two(cols)))
    return block._replace(cols=width, warps=min(block.warps, width // 256))


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
    """One instruction and a product; `tl.exp` takes five, for results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def _statistics_kernel(
    logits_ptr,
    targets_ptr,
    out_ptr,
    tokens,
    cols,
    first,
    BLOCK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * cols
    # The lowest number, not -infinity, whose difference with itself would be NaN.
    largest = tl.full([BLOCK_COLS // VECTOR], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK_COLS // VECTOR], tl.float32)
    for start in tl.range(0, cols, BLOCK_COLS, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_COLS)
        x = tl.load(row_ptr + col, col < cols, float("-inf")).to(tl.float32)
        x = tl.reshape(x, [BLOCK_COLS // VECTOR, VECTOR])
        raised = tl.maximum(largest, tl.max(x, axis=1))
        total = total * _exp(largest - raised) + tl.sum(_exp(x - raised[:, None]), axis=1)
        largest = raised
    row_max = tl.max(largest, axis=0)
    tl.store(out_ptr + token, row_max)
    tl.store(out_ptr + tokens + token, tl.sum(total * _exp(largest - row_max), axis=0))
    index = tl.load(targets_ptr + token) - first
    target = tl.load(row_ptr + index, (index >= 0) & (index < cols), 0.0)
    tl.store(out_ptr + 2 * tokens + token, target.to(tl.float32))


def statistics_launch(logits: Tensor, targets: Tensor, first: int, out: Tensor) -> None:
    tokens, cols = logits.shape
    if tokens == 0:
        return
    block = tile("cross_entropy_statistics", logits.dtype, cols)
    with on_device_of(logits):
        _statistics_kernel[(tokens,)](
            *(logits, targets, out, tokens, cols, first, block.cols, vector_of(logits), block.stages),
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
    out_ptr,
    logits_ptr,
    targets_ptr,
    largest_ptr,
    log_sum_ptr,
    scale_ptr,
    cols,
    first,
    ignore_index,
    BLOCK_COLS: tl.constexpr,
):
    across = tl.cdiv(cols, BLOCK_COLS)
    token = tl.program_id(0) // across
    start = (tl.program_id(0) % across) * BLOCK_COLS
    col = start + tl.arange(0, BLOCK_COLS)
    mask = col < cols
    index = token.to(tl.int64) * cols + col
    target = tl.load(targets_ptr + token)
    if target == ignore_index:
        tl.store(out_ptr + index, tl.zeros([BLOCK_COLS], out_ptr.dtype.element_ty), mask)
    else:
        x = tl.load(logits_ptr + index, mask, 0.0).to(tl.float32)
        x -= tl.load(largest_ptr + token)
        here = (target - first).to(tl.int32)
        grad = _exp(x - tl.load(log_sum_ptr + token)) - (col == here).to(tl.float32)
        grad *= tl.load(scale_ptr + token)
        tl.store(out_ptr + index, grad.to(out_ptr.dtype.element_ty), mask)


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
    with on_device_of(out):
        _grad_kernel[(tokens * cdiv(cols, block.cols),)](
            *(out, source, targets, largest, log_sum, scale, cols, first, ignore_index, block.cols),
            **block.options,
        )


_grad = operator(
    "cross_entropy_grad_(Tensor(a!) out, Tensor? logits, Tensor targets, Tensor largest, "
    "Tensor log_sum, Tensor scale, int first, int ignore_index) -> ()",
    reference=grad_reference,
    launch=grad_launch,
)


class Statistics(NamedTuple):
    """FP32 [tokens] each: what a part of the vocabulary adds to the loss."""

    max: Tensor
    sum: Tensor
    target: Tensor

    @property
    def loss(self) -> Tensor:
        """Where the part is the whole."""
        return (self.max - self.target) + self.sum.log()


def cross_entropy_statistics(logits: Tensor, targets: Tensor, *, first: int = 0) -> Tensor:
    """FP32 [3, tokens]: maximum, sum and target logit of each token, as in `Statistics`.

    Args:
        logits: FP32, fp16 or bf16 [tokens, vocabulary], or a part of the columns; contiguous.
        targets: int64 [tokens], ids of the whole vocabulary; others (such as -100) have 0 as their logit.
        first: the id of the first column.

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
        logits, targets, first: as for `cross_entropy_statistics`.
        largest, log_sum: FP32 [tokens]: max and log(sum) of the whole vocabulary.
        scale: FP32 [tokens], gradient of each token's loss.
        ignore_index: tokens with this target get 0, whatever their logits are.
        inplace: write the gradient over the logits, and return those.

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
    # Autograd does not see what a kernel writes, and has to refuse further uses of these logits.
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
