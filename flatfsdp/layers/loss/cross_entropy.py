"""`cross_entropy`: the loss of 16-bit logits, without an FP32 copy of them.

In:   logits [..., vocabulary], or this rank's columns of them; targets [...].
Out:  the loss in FP32; in backward a gradient in the logits' dtype.
Next: `linear_cross_entropy.py` puts the head's GEMM in front.

With the vocabulary split over tensor-parallel ranks, each rank reads only its own columns:

    rank r     max, sum of exp, target's logit      FP32 [tokens] each
    all        maximum of the maxima                one all-reduce
    rank r     sum, scaled to that maximum
    all        sums and target's logits             one all-reduce of both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch_on_host
from flatfsdp.comm.ranks import Ranks
from flatfsdp.kernels.cross_entropy import Statistics, cross_entropy_grad, cross_entropy_statistics
from flatfsdp.torch_private import Function, never_traced, once_differentiable

ReductionKind = Literal["mean", "sum", "none"]


@never_traced
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: ReductionKind = "mean",
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Computes F.cross_entropy of FP32 logits without making them.

    Args:
        logits: FP32, fp16 or bf16 [..., vocabulary]; with `tp_group` this rank's columns, equally many on
            each rank, in rank order.
        targets: int64 [...], ids of the whole vocabulary, the same on all ranks of `tp_group`.
        ignore_index: tokens with this target are ignored.
        reduction: "mean" over the tokens that are not ignored (NaN if there are none), "sum", or "none".
        tp_group: the ranks that the vocabulary is split over.
        inplace_backward: write the gradient over the logits.  Only if nothing else needs them after backward:
            autograd raises if one of its operations does, but cannot detect other code that reads them.

    Returns:
        FP32, a scalar, or of targets' shape for "none"; the same on all ranks of `tp_group`.

    Raises:
        ValueError: if an argument does not fit, or a leaf would be overwritten.
        RuntimeError: if a target is not in the vocabulary; on a GPU later, as a failed assertion.
    """
    how = Reduction(ignore_index, reduction)
    ids = ids_of("cross_entropy", logits.shape[:-1], targets)
    if inplace_backward:
        owner = logits if logits._base is None else logits._base
        if torch.is_grad_enabled() and owner.is_leaf and owner.requires_grad:
            raise ValueError(
                "cross_entropy: inplace_backward would overwrite a leaf; pass what an operation returns"
            )
    matrix = logits.reshape(ids.numel(), logits.shape[-1]).contiguous()
    loss: Tensor = CrossEntropyNode.run(matrix, ids, how, Ranks.of(tp_group), inplace_backward)
    return loss.view_as(targets) if reduction == "none" else loss


class CrossEntropyNode(Function):
    """Autograd node of the loss of logits [tokens, columns of this rank]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, how: Reduction, ranks: Ranks, inplace_backward: bool
    ) -> Tensor:
        """Reads the logits once."""
        cols = logits.shape[1]
        first = ranks.rank * cols
        counts = how.counted(targets, ranks.size * cols)
        found = joined(cross_entropy_statistics(logits, targets, first=first), ranks)
        ctx.how, ctx.first, ctx.inplace_backward = how, first, inplace_backward
        loss, count = how.loss(found.loss, counts)
        ctx.save_for_backward(logits, targets, found.max, found.sum.log(), count)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradient of the logits, over them if `inplace_backward`."""
        logits, targets, largest, log_sum, count = ctx.saved_tensors
        grad = cross_entropy_grad(
            logits.detach(),
            targets,
            largest,
            log_sum,
            ctx.how.scale(dloss, targets, count),
            first=ctx.first,
            ignore_index=ctx.how.ignore_index,
            inplace=ctx.inplace_backward,
        )
        return grad, None, None, None, None


def joined(statistics: Tensor, ranks: Ranks) -> Statistics:
    """Combines each rank's statistics [3, tokens] into those of the whole vocabulary, in place.

    Collective over `ranks`: two all-reduces, none for a single rank.
    """
    found = Statistics(*statistics)
    if ranks.size > 1:
        largest = found.max.clone()
        exchange = Identity.counting(Action.EXCHANGE, largest.numel())
        with launch_on_host(ranks, exchange, largest.device):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        # Each rank's sum is relative to its own maximum.
        found.sum.mul_((found.max - largest).exp_())
        found.max.copy_(largest)
        # Sum and target are adjacent rows.
        dist.all_reduce(statistics[1:], group=ranks.group)
    return found


@dataclass(frozen=True)
class Reduction:
    """How the losses of tokens are reduced to the returned loss.

    Raises:
        ValueError: if `kind` is not "mean", "sum" or "none".
    """

    ignore_index: int
    kind: ReductionKind

    def __post_init__(self) -> None:
        if self.kind not in get_args(ReductionKind):
            raise ValueError(f"reduction is {self.kind!r}; it must be 'mean', 'sum' or 'none'")

    def counted(self, targets: Tensor, vocabulary: int) -> Tensor:
        """Which tokens count, bool [tokens]; checks the targets without waiting for a GPU.

        Raises:
            RuntimeError: if a target is neither ignored nor an id; on a GPU later, as a failed assertion.
        """
        counts = targets != self.ignore_index
        is_id = (targets >= 0) & (targets < vocabulary)
        # Of booleans, >= says that what counts is an id, in one kernel.
        torch._assert_async(
            (is_id >= counts).all(),
            f"cross_entropy: a target is outside of the vocabulary of {vocabulary}, and not "
            f"ignore_index={self.ignore_index}",
        )
        return counts

    def loss(self, of_tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """The reduced loss, FP32, a scalar or [tokens]; and the number of tokens that it was divided by."""
        losses = of_tokens.where(counts, 0.0)
        if self.kind == "none":
            return losses, None
        count = counts.sum() if self.kind == "mean" else None
        # 0 / 0 is NaN, as in torch.
        return losses.sum() if count is None else losses.sum() / count, count

    def scale(self, dloss: Tensor, targets: Tensor, count: Tensor | None) -> Tensor:
        """Gradients of the tokens' losses, FP32 [tokens]; entries of ignored tokens are unused."""
        if count is not None:
            dloss = dloss / count
        return dloss.expand(targets.shape).contiguous()


def ids_of(function: str, shape: Sequence[int], targets: Tensor) -> Tensor:
    """Makes `targets`, one for each token [...] of `shape`, a contiguous [tokens].

    Raises:
        ValueError: if their shape is not `shape`.
    """
    if targets.shape != tuple(shape):
        raise ValueError(f"{function}: targets have shape {tuple(targets.shape)}, and tokens {tuple(shape)}")
    return targets.reshape(-1).contiguous()
