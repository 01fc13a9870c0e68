"""A norm and a linear map as one autograd node; in FP8 the norm's kernel also casts.

In:   x [tokens, in_features], optionally a residual to add first, and the parameters of norm and map.
Next: `normalized.py` has the norm, `matmul/linear_map.py` the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.layers.normalized import NormKind, add_to, input_grads, normalize
from flatfsdp.matmul.linear_map import LinearCall, LinearSaved, linear_backward, linear_forward, quantize_grad
from flatfsdp.torch_private import Function, once_differentiable


@dataclass(slots=True)
class NormLinearSpec:
    """The arguments of one call besides its tensors.

    Attributes:
        norm: kind of norm.
        call: the linear map.
        keep: whether to return norm(x) as well.
    """

    norm: NormKind
    call: LinearCall
    keep: bool


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
        spec: NormLinearSpec,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Normalizes, casts and multiplies."""
        normalized, kept, norm = normalize(
            x, residual, norm_weight, norm_bias, spec.norm, spec.call, spec.keep
        )
        out, saved = linear_forward(normalized, operand, bias, spec.call)
        ctx.spec = spec
        ctx.save_for_backward(*(norm if spec.call.needs_input_grad else (None,) * 4), *saved.tensors)
        # A result that nothing used has no gradient; zeros in its place would cost memory and a pass.
        ctx.set_materialize_grads(False)
        return out, kept, norm[0]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnormalized: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, residual and parameters."""
        saved = ctx.saved_tensors
        call, norm = ctx.spec.call, ctx.spec.norm
        dweight = dbias = None
        if dy is not None:
            quantized = quantize_grad(dy, call)
            dx, dweight, dbias = linear_backward(quantized, LinearSaved.of(saved[4:]), call, ctx)
            dnormalized = add_to(dx, dnormalized)
        grads = input_grads(dnormalized, saved[:4], norm, dresidual, has_residual=ctx.needs_input_grad[1])
        return *grads, dweight, dbias, None, None
