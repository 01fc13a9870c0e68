"""One linear map as an autograd node.

In:   x [tokens, in_features], weight and bias.
Next: `matmul/linear_map.py` has the primitive.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatfsdp.contract.operand import Operand
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
