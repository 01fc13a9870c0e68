"""One linear map as an autograd node, alone or with a norm before it; in FP8 the norm's kernel also casts.

In:   x [tokens, in_features], optionally a residual to add first, and the parameters of norm and map.
Next: `normalized.py` has the norm, `matmul/linear_map.py` the GEMMs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.layers.normalized import NormKind, add_to, input_grads, normalize
from flatfsdp.matmul.linear_map import LinearCall, LinearSaved, linear_backward, linear_forward, quantize_grad
from flatfsdp.torch_private import Function, once_differentiable


class LinearNode(Function):
    """Autograd node of x w^T + b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operand: Operand,
        call: LinearCall,
    ) -> Tensor:
        """Casts x and multiplies."""
        quantized = call.input_quantizer.cast(x, rowwise=True, columnwise=call.wants_columnwise_input)
        out, saved = linear_forward(quantized.operand, operand, bias, call)
        ctx.call = call
        ctx.save_for_backward(*saved.tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, weight and bias."""
        saved = LinearSaved.of(ctx.saved_tensors)
        dx, dweight, dbias = linear_backward(quantize_grad(dy, ctx.call), saved, ctx.call, ctx)
        return dx, dweight, dbias, None, None


class NormLinearNode(Function):
    """Autograd node of norm(x) w^T + b; returns the result, norm(x) if requested, and the norm's input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        operand: Operand,
        norm: NormKind,
        call: LinearCall,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Normalizes, casts and multiplies."""
        normalized, kept, of_norm = normalize(x, residual, norm_weight, norm_bias, norm, call, keep)
        out, saved = linear_forward(normalized, operand, bias, call)
        ctx.norm, ctx.call = norm, call
        ctx.save_for_backward(*(of_norm if call.needs_input_grad else (None,) * 4), *saved.tensors)
        # A result that nothing used has no gradient; zeros in its place would cost memory and a pass.
        ctx.set_materialize_grads(False)
        return out, kept, of_norm[0]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnormalized: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, residual and parameters."""
        saved = ctx.saved_tensors
        call: LinearCall = ctx.call
        dweight = dbias = None
        if dy is not None:
            quantized = quantize_grad(dy, call)
            dx, dweight, dbias = linear_backward(quantized, LinearSaved.of(saved[4:]), call, ctx)
            dnormalized = add_to(dx, dnormalized)
        grads = input_grads(dnormalized, saved[:4], ctx.norm, dresidual, has_residual=ctx.needs_input_grad[1])
        return *grads, dweight, dbias, None, None, None, None
