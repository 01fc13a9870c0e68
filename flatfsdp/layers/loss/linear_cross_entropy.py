"""`LinearCrossEntropy`: the output head of a language model and its loss, with little memory for logits.

In:   [..., in_features], and targets [...];  out: the loss, FP32.
Next: `cross_entropy.py` computes the loss, `matmul/linear_map.py` the GEMMs.

    chunk_tokens   forward                     kept for backward      backward
    None           all logits, statistics      x, w, logits           gradient written over the logits
    n              n tokens' logits at a time  x, w                   recomputed for n tokens at a time

With the vocabulary split over tensor-parallel ranks, these are each rank's columns of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.main_grad import MainGradSlot, claim
from flatfsdp.contract.operand import Operand
from flatfsdp.kernels.cross_entropy import cross_entropy_grad, cross_entropy_statistics
from flatfsdp.kernels.grad.accumulate import accumulate
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import CallInput, prepare
from flatfsdp.layers.layer_options import LinearOptions
from flatfsdp.layers.linear import Linear
from flatfsdp.layers.loss.cross_entropy import CrossEntropyNode, Reduction, ReductionKind, ids_of, joined
from flatfsdp.layers.nodes.linear import LinearNode
from flatfsdp.matmul import gemms
from flatfsdp.matmul.linear_map import LinearCall
from flatfsdp.torch_private import Function, never_traced, once_differentiable, receives_gradient


class LinearCrossEntropy(Linear):
    """A `Linear` without bias that returns the cross-entropy of its result when given targets.

    Its GEMMs run in the dtype of the activations, never in FP8.

    Args:
        in_features: hidden size.
        out_features: size of the vocabulary.
        bias: only False.
        ignore_index: tokens with this target are ignored.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        chunk_tokens: None keeps the logits for backward, in the dtype of the activations, and writes their
            gradient over them.  A number keeps none: forward and backward each compute the logits of that
            many tokens at a time.  This costs a third GEMM of the head and, without fuse_wgrad_accumulation
            or if `main_grad` is bf16, an FP32 weight gradient that the chunks are added to.
        options: the further options of `Linear`, listed in `LinearOptions`.  parallel_mode="column" splits
            the vocabulary over `tp_group`; all its ranks pass the same targets and get the same loss.

    Attributes:
        weight: [out_features, in_features].

    Raises:
        ValueError: if options contradict each other, or the vocabulary does not divide evenly over the ranks.
        NotImplementedError: for a bias, several parts of the weight, or parallel_mode="row".
    """

    allows_fp8 = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        reduction: ReductionKind = "mean",
        chunk_tokens: int | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        parts = {"return_bias": False, "parameters_split": None, "partition_sizes": None}
        if bias or any(options.get(name, default) != default for name, default in parts.items()):
            raise NotImplementedError(
                "LinearCrossEntropy has one weight and no bias: leave out bias, return_bias, "
                "parameters_split and partition_sizes, or use Linear and cross_entropy"
            )
        if options.get("parallel_mode") == "row":
            raise NotImplementedError("LinearCrossEntropy: parallel_mode is 'row'; use 'column'")
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"LinearCrossEntropy: chunk_tokens is {chunk_tokens}, not positive or None")
        how = Reduction(ignore_index, reduction)
        super().__init__(in_features, out_features, bias=False, **options)
        self.how = how
        self.chunk_tokens = chunk_tokens

    @never_traced
    def forward(  # type: ignore[override]  # targets come second, as in any loss
        self, inp: Tensor, targets: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """The loss if targets are given, else this rank's logits [..., out_features].

        Args:
            inp: [..., in_features].
            targets: int64 [...]; for the whole sequence even where `inp` is this rank's part of it.
            is_first_microbatch: True overwrites a plain `main_grad`, False and None add to it.

        Raises:
            ValueError: if a shape does not fit.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if a target is not in the vocabulary; on a GPU later, as a failed assertion.
        """
        if targets is None:
            logits: Tensor = super().forward(inp, is_first_microbatch)
            return logits
        of = MapOf("weight", self._whole_weight(), None)
        ready = prepare(self, inp, of, is_first_microbatch=is_first_microbatch)
        return linear_cross_entropy(ready, targets, self.how, self.chunk_tokens)

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        chunks = "" if self.chunk_tokens is None else f", chunk_tokens={self.chunk_tokens}"
        return super().extra_repr() + chunks


def linear_cross_entropy(
    ready: CallInput, targets: Tensor, how: Reduction, chunk_tokens: int | None = None
) -> Tensor:
    """Cross-entropy of x w^T: FP32, a scalar, or [...] if `how` does not reduce.

    Args:
        ready: from `prepare`: a layer whose GEMMs are never in FP8 (`allows_fp8` is False), its linear map,
            without a bias and not transposed, and the input.
        targets: int64 [...].
        how: reduction and ignored index.
        chunk_tokens: tokens whose logits exist at a time; None keeps all logits until backward.

    Raises:
        ValueError: if a shape does not fit.
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if a target is not in the vocabulary; on a GPU later, as a failed assertion.
    """
    ids = ids_of(type(ready.owner).__name__, ready.leading, targets)
    operand, call = ready.prepared(0, (ready.inp,))
    x, weight = ready.x, ready.maps[0].weight
    # Without a split vocabulary each rank computes its own loss.
    ranks = call.exchange.ranks if call.exchange.mode == "column" else ALONE
    loss: Tensor
    if chunk_tokens is None:
        loss = _OfLogits.run(LinearNode.run(x, weight, None, operand, call), ids, how, ranks, True)
    else:
        loss = _OfChunks.run(x, weight, ids, operand, call, how, ranks, chunk_tokens)
    return loss.view_as(targets) if how.kind == "none" else loss


class _OfLogits(CrossEntropyNode):
    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd notices overwritten logits, too, but does not say what to do, and sees nothing where hooks
        # on saved tensors have made a copy.
        if getattr(ctx, "is_spent", False):
            raise RuntimeError(
                "LinearCrossEntropy: second backward through one forward, whose logits the first one has "
                "overwritten; use chunk_tokens, which recomputes them"
            )
        ctx.is_spent = True
        return CrossEntropyNode.backward(ctx, dloss)


class _OfChunks(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        operand: Operand,
        call: LinearCall,
        how: Reduction,
        ranks: Ranks,
        chunk_tokens: int,
    ) -> Tensor:
        cols = weight.shape[0]
        ctx.first = first = ranks.rank * cols
        counts = how.counted(targets, ranks.size * cols)
        chunks = zip(_gathered(x, call).split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        # Nothing may hold a chunk's logits: the next ones reuse their memory.
        parts = [
            cross_entropy_statistics(_logits(part, operand, call), ids, first=first) for part, ids in chunks
        ]
        found = joined(torch.cat(parts, 1), ranks)
        ctx.call, ctx.how, ctx.chunk_tokens = call, how, chunk_tokens
        loss, count = how.loss(found.loss, counts)
        # x before it is gathered: the other ranks' rows are gathered again in backward.
        ctx.save_for_backward(targets, found.max, found.sum.log(), count, x, operand.high)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Recomputes logits chunk by chunk; all chunks add to one FP32 weight gradient."""
        targets, largest, log_sum, count, x, high = ctx.saved_tensors
        call: LinearCall = ctx.call
        weight, slot, dx = Operand(high), _weight_grad_slot(high, call), []
        # A bf16 main_grad would round the sum at every chunk.
        narrow = slot if slot is not None and slot.target.dtype != torch.float32 else None
        if narrow is not None:
            slot = MainGradSlot(torch.empty_like(narrow.target, dtype=torch.float32), first=True)
        scale = ctx.how.scale(dloss, targets, count)
        of_tokens = (_gathered(x, call), targets, largest, log_sum, scale)
        for chunk, *of_chunk in zip(*(each.split(ctx.chunk_tokens) for each in of_tokens), strict=True):
            dy = Operand(
                cross_entropy_grad(
                    _logits(chunk, weight, call),
                    *of_chunk,
                    first=ctx.first,
                    ignore_index=ctx.how.ignore_index,
                    inplace=True,
                )
            )
            if call.needs_input_grad:
                dx.append(gemms.dgrad(dy, weight, call.dtype, call.split))
            if slot is not None:
                two_passes = call.fuse_wgrad == "two_pass"
                gemms.accumulate_wgrad(
                    slot.target, dy, Operand(chunk), call.split, first=slot.first, two_passes=two_passes
                )
                # Only the first chunk may overwrite what is there.
                slot = slot._replace(first=False)
            # Freed first: the next chunk's logits reuse the memory.
            del dy
        dweight = slot.target.to(call.weight_dtype) if slot is not None and call.weight is None else None
        if slot is not None and narrow is not None:
            accumulate(narrow.target, slot.target, first=narrow.first)
        # Freed first, where it is a temporary: the input's gradient needs memory, too.
        del slot
        whole = torch.cat(dx) if dx else None
        if whole is not None and call.exchange.sums_input_grad:
            # Over the ranks that share the vocabulary.
            whole = call.exchange.start_sum(whole).wait()
        return whole, dweight, *(None,) * 6


def _gathered(x: Tensor, call: LinearCall) -> Tensor:
    """The rows of all ranks if the sequence is split."""
    return call.exchange.start_gather(x).wait() if call.exchange.gathers_input else x


def _logits(x: Tensor, weight: Operand, call: LinearCall) -> Tensor:
    return gemms.fprop(Operand(x), weight, None, call.dtype, call.split)


def _weight_grad_slot(weight: Tensor, call: LinearCall) -> MainGradSlot | None:
    """The tensor that chunks are added to: main_grad or a new one; None if no weight gradient is needed."""
    if not call.needs_weight_grad:
        return None
    if call.weight is None:
        return MainGradSlot(torch.empty_like(weight, dtype=torch.float32), first=True)
    if not receives_gradient(call.weight):
        return None
    return claim(call.weight, call.name, call.is_first_microbatch)
