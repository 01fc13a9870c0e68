"""A norm and a linear map as one autograd node; in FP8 the norm casts its own result.

In:   x [tokens, in_features], perhaps a residual that is added first, and the parameters of norm and map.
Next: `normalized.py` has the norm, `matmul/linear_map.py` the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.layers.normalized import NormKind, add_to, input_grads, normalize
from flatfsdp.matmul.linear_map import LinearCall, LinearSaved, linear_backward, linear_forward, quantize_grad
from flatfsdp.torch_private import once_differentiable


@dataclass(slots=True)
class NormLinearSpec:
    """What one call of the node needs besides tensors.

    Attributes:
        keep: whether norm(x) is a result, too.
    """

    norm: NormKind
    call: LinearCall
    keep: bool


class NormLinearNode(torch.autograd.Function):
    """norm(x) w^T + b, or norm(x + residual) w^T + b; also norm(x) if asked for, and what was normalized."""

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
        normalized = normalize(
            x,
            norm_weight,
            norm_bias,
            spec.norm,
            spec.call.input_quantizer,
            residual=residual,
            columnwise=spec.call.wants_columnwise_input,
            keep=spec.keep,
        )
        out, saved = linear_forward(normalized.operand, operand, bias, spec.call)
        ctx.spec = spec
        statistics = (normalized.summed, norm_weight, normalized.mean, normalized.rstd)
        is_needed = spec.call.needs_input_grad
        ctx.save_for_backward(*(statistics if is_needed else (None,) * 4), *saved.tensors)
        ctx.set_materialize_grads(False)
        return out, normalized.out, normalized.summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnormalized: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call, norm = ctx.spec.call, ctx.spec.norm
        dweight = dbias = None
        if dy is not None:
            dx, dweight, dbias = linear_backward(quantize_grad(dy, call), LinearSaved.of(saved[4:]), call)
            dnormalized = add_to(dx, dnormalized)
        grads = input_grads(dnormalized, saved[:4], norm, dresidual, has_residual=ctx.needs_input_grad[1])
        return *grads, dweight, dbias, None, None
