"""Bias, dropout and residual in one pass; backward regenerates the mask from the stored seed.

In:   x [..., cols], a bias, a residual;  out: residual + dropout(x + bias), of x's shape.
Next: `kernels/dropout.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.rng import GetTracker, RNGTracker
from flatfsdp.fp8.recompute import require_repeatable
from flatfsdp.kernels.cast.column_sum import column_sum
from flatfsdp.kernels.dropout import draw_seed, dropout_backward, dropout_forward
from flatfsdp.torch_private import never_traced, once_differentiable


class OwnNumbers:
    """Random numbers for dropout of activations that differ between tensor-parallel ranks.

    Args:
        get_tracker: returns an object with `fork()`, such as Transformer Engine's or Megatron's tracker;
            default: an `RNGTracker`.
        ranks: the tensor-parallel ranks that share the layer.
    """

    def __init__(self, get_tracker: GetTracker | None, ranks: Ranks) -> None:
        self._tracker = RNGTracker.over(ranks) if get_tracker is None else get_tracker()

    def drawn(self, are_drawn: bool) -> AbstractContextManager[Any]:
        """Context that draws from this rank's own generator; does nothing if no numbers are drawn.

        Raises:
            RuntimeError: if recomputation could not repeat the tracker's numbers.
        """
        if not are_drawn:
            return nullcontext()
        require_repeatable(self._tracker)
        return self._tracker.fork()


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool
) -> Tensor:
    """Computes residual + dropout(x + bias), in the dtype that x and the residual promote to.

    Args:
        x: [..., cols], FP32, fp16 or bf16.
        bias: [cols], or None.  Its gradient is summed in FP32.
        residual: of x's shape, or None.  Its gradient is the result's, not a copy.
        p: probability of dropping an element, 0 <= p < 1.
        training: False drops nothing.

    Raises:
        ValueError: if shapes, dtypes or p do not fit.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; dropout needs 0 <= p < 1")
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(f"the residual has shape {tuple(residual.shape)}; x has {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), residual.to(dtype)
    if not training:
        p = 0.0
    if bias is None and p == 0:
        return x if residual is None else x + residual
    if p == 0:
        return _BiasDropoutAdd.apply(x, bias, residual, p, None)
    return _drop(x, bias, residual, p)


# torch.compile would draw other seeds than eager calls do.
@never_traced
def _drop(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual, p, draw_seed(x.device))


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor | None
    ) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(seed)
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = dropout_forward(
            _rows(x),
            None if bias is None else bias.to(x.dtype),
            None if residual is None else _rows(residual),
            p,
            seed,
        )
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, needs_bias_grad, needs_residual_grad, *_ = ctx.needs_input_grad
        rows = _rows(dy)
        (seed,) = ctx.saved_tensors
        if ctx.p:
            dx, dbias = dropout_backward(rows, ctx.p, seed, column_sum=needs_bias_grad)
            dx = dx.view(dy.shape)
        else:
            dx, dbias = dy, column_sum(rows) if needs_bias_grad else None
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        return dx, dbias, dy if needs_residual_grad else None, None, None


def _rows(x: Tensor) -> Tensor:
    """A contiguous matrix of x's rows."""
    return x.reshape(-1, x.shape[-1]).contiguous()
