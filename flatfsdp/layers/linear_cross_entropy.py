"""`LinearCrossEntropy`: the head of a language model and its loss, in which logits need little memory.

In:   [..., in_features], and targets [...];  out: the loss, FP32.
Next: `cross_entropy.py` has the loss, `fp8/linear.py` the products.

    chunk_tokens   forward                     kept for backward      backward
    None           all logits, statistics      x, w, logits           their gradient, over the logits
    n              n tokens' logits at a time  x, w                   n tokens' logits again, and over them
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from flatfsdp.autograd import receives_gradient
from flatfsdp.fp8 import products
from flatfsdp.fp8.linear import LinearCall, LinearGrads, LinearSaved, linear_backward, linear_forward
from flatfsdp.fp8.main_grad import MainGradSlot, claim
from flatfsdp.fp8.operand import Operand
from flatfsdp.fp8.quantizers import Quantized
from flatfsdp.kernels.cross_entropy import Statistics, cross_entropy_grad, cross_entropy_statistics
from flatfsdp.layers.cross_entropy import Reduction, ReductionKind, ids_of
from flatfsdp.layers.linear import Linear
from flatfsdp.layers.projection import LinearOptions


class LinearCrossEntropy(Linear):
    """A `Linear` without bias that, given targets, returns the cross-entropy of its result.

    Products are in the dtype of the activations, never in FP8.

    Args:
        in_features, out_features: hidden size and vocabulary.
        bias: only False.
        ignore_index, reduction: see `cross_entropy`.
        chunk_tokens: None keeps the logits from forward to backward, in the dtype of the activations, and
            writes their gradient over them.  A number keeps none: forward and backward each compute those of
            so many tokens at a time.  That costs a third product of the head, and without
            fuse_wgrad_accumulation an FP32 gradient of the weight, to which chunks are added in order.
        options: see `LinearOptions`.

    Attributes:
        weight: [out_features, in_features], as a `Linear` has it.

    Raises:
        ValueError: if options contradict each other.
        NotImplementedError: for a bias or tensor parallelism.
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
        if bias or options.get("return_bias") or options.get("parameters_split") is not None:
            raise NotImplementedError(
                "LinearCrossEntropy has one weight and no bias: leave out bias, return_bias and "
                "parameters_split, or use Linear and cross_entropy"
            )
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(
                f"LinearCrossEntropy: chunk_tokens is {chunk_tokens}; it must be positive, or None"
            )
        how = Reduction(ignore_index, reduction)
        super().__init__(in_features, out_features, False, **options)
        self.how = how
        self.chunk_tokens = chunk_tokens

    @torch.compiler.disable
    def forward(  # targets come second, as in any loss
        self, inp: Tensor, targets: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Logits [..., out_features] without targets; with them the loss.

        Args:
            targets: int64 [...].
            is_first_microbatch: True overwrites a plain `main_grad`, as in `Linear`.

        Raises:
            ValueError: if a shape does not fit.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if a target is no id of the vocabulary; on a GPU as a failed assertion, later.
        """
        if targets is None:
            logits: Tensor = super().forward(inp, is_first_microbatch)
            return logits
        ids = ids_of(type(self).__name__, inp, targets)
        ready = self.prepare(inp, is_first_microbatch)
        loss: Tensor = _LinearCrossEntropy.apply(
            ready.x, ready.weight, ids, ready.operand, ready.call, self.how, self.chunk_tokens
        )
        return loss.view_as(targets) if self.how.kind == "none" else loss

    def extra_repr(self) -> str:
        chunks = "" if self.chunk_tokens is None else f", chunk_tokens={self.chunk_tokens}"
        return super().extra_repr() + chunks


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        operand: Operand,
        call: LinearCall,
        how: Reduction,
        chunk_tokens: int | None,
    ) -> Tensor:
        how.require_ids(targets, weight.shape[0])
        logits = None
        if chunk_tokens is None:
            logits, saved = linear_forward(Operand(x), operand, None, call)
            statistics = cross_entropy_statistics(logits, targets)
        else:
            saved = LinearSaved(Operand(x), operand)
            chunks = zip(x.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
            # A function's logits are gone when the next ones come.
            statistics = torch.cat([_statistics(part, ids, operand, call) for part, ids in chunks], 1)
        found = Statistics(*statistics)
        ctx.call, ctx.how, ctx.chunk_tokens, ctx.is_spent = call, how, chunk_tokens, False
        ctx.save_for_backward(targets, found.max, found.sum.log(), logits, *saved.tensors)
        return how.loss(found.loss, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spent:
            raise RuntimeError(
                "LinearCrossEntropy: a second backward through one forward, whose logits the first one has "
                "overwritten; use chunk_tokens, which computes them again"
            )
        targets, largest, log_sum, logits, *tensors = ctx.saved_tensors
        saved = LinearSaved.of(tensors)
        per_token = PerToken(targets, largest, log_sum, ctx.how.scale(dloss, targets))
        if logits is None:
            grads = _chunked_backward(per_token, saved, ctx.call, ctx.how, ctx.chunk_tokens)
        else:
            ctx.is_spent = True
            grads = linear_backward(Quantized(_grad(logits, per_token, ctx.how), None), saved, ctx.call)
        return grads.x, grads.weight, None, None, None, None, None


class PerToken(NamedTuple):
    """[tokens] each; see `cross_entropy_grad`."""

    targets: Tensor
    largest: Tensor
    log_sum: Tensor
    scale: Tensor

    def split(self, size: int) -> Iterator[PerToken]:
        return map(PerToken, *(tensor.split(size) for tensor in self))


def _statistics(x: Tensor, targets: Tensor, weight: Operand, call: LinearCall) -> Tensor:
    logits, _ = linear_forward(Operand(x), weight, None, call)
    return cross_entropy_statistics(logits, targets)


def _grad(logits: Tensor, per_token: PerToken, how: Reduction) -> Operand:
    """Over the logits."""
    return Operand(
        cross_entropy_grad(logits.detach(), *per_token, ignore_index=how.ignore_index, inplace=True)
    )


def _chunked_backward(
    per_token: PerToken, saved: LinearSaved, call: LinearCall, how: Reduction, chunk_tokens: int
) -> LinearGrads:
    """Computes logits again, of one chunk after the other, which all add to one FP32 gradient."""
    x, weight = saved.x.high, saved.weight.high
    assert x is not None and weight is not None
    slot = _weight_grad_slot(weight, call)
    dx = []
    for chunk, of_chunk in zip(x.split(chunk_tokens), per_token.split(chunk_tokens), strict=True):
        logits, _ = linear_forward(Operand(chunk), saved.weight, None, call)
        dy = _grad(logits, of_chunk, how)
        if call.needs_input_grad:
            dx.append(products.dgrad(dy, saved.weight, call.dtype, call.split))
        if slot is not None:
            two_passes = call.fuse_wgrad == "two_pass"
            products.accumulate_wgrad(
                slot.target, dy, Operand(chunk), call.split, first=slot.first, two_passes=two_passes
            )
            slot = slot._replace(first=False)
        # The next chunk's come into their place.
        del logits, dy
    dweight = slot.target.to(call.weight_dtype) if slot is not None and call.weight is None else None
    return LinearGrads(torch.cat(dx) if dx else None, dweight, None)


def _weight_grad_slot(weight: Tensor, call: LinearCall) -> MainGradSlot | None:
    """Where chunks add up: main_grad, or a new tensor; None: this backward does not ask for it."""
    if not call.needs_weight_grad:
        return None
    if call.weight is None:
        return MainGradSlot(torch.empty_like(weight, dtype=torch.float32), first=True)
    if not receives_gradient(call.weight):
        return None
    return claim(call.weight, call.name, call.is_first_microbatch)
