"""`LayerNormLinear`: a norm and a linear layer as one autograd node; in FP8 the norm casts its own result.

In:   [..., in_features];  out: [..., out_features].
Next: `layers/attention/multihead.py` has one for query, key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from flatfsdp.contract.operand import Operand
from flatfsdp.layers.inputs import residual_matrix
from flatfsdp.layers.norm_first import NormFirst
from flatfsdp.layers.normalized import NormKind, add_to, input_grads, normalize
from flatfsdp.layers.options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.matmul.linear_map import LinearCall, LinearSaved, linear_backward, linear_forward, quantize_grad


class LayerNormLinear(NormFirst, Projection):
    """y = norm(x) w^T + b, or norm(x + residual) w^T + b.

    Args:
        in_features, out_features, bias: as `Linear`.
        eps: of the norm.
        normalization, zero_centered_gamma: see `BlockOptions`.
        return_layernorm_output: return norm(x) as well.
        options: see `LinearOptions`; parallel_mode cannot be "row".

    Attributes:
        layer_norm_weight, layer_norm_bias: [in_features]; RMSNorm has no bias.
        weight, bias: as `Linear`'s.

    Raises:
        ValueError: as `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        if options.get("parallel_mode") == "row":
            raise ValueError("LayerNormLinear: parallel_mode is 'row'; a norm needs all features of a token")
        super().__init__(in_features, out_features, bias, **options)
        self.return_layernorm_output = return_layernorm_output
        self._add_norm(in_features, NormKind.named(normalization, eps, zero_centered_gamma))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_norm()

    @torch.compiler.disable
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """[..., in_features] to [..., out_features], of this rank's part.

        Args:
            is_first_microbatch: as `Linear`.
            residual: of inp's shape; the norm adds it to `inp` in the same pass.
            return_residual: return `inp`, or inp + residual, as well, for a residual connection around this
                layer: its gradient is then added inside the norm's backward.  In torch.autocast's dtype,
                where that is on.

        Returns:
            out, or a tuple of out, the bias with `return_bias`, the norm's result with
            `return_layernorm_output` and what was normalized with `return_residual`.

        Raises:
            ValueError, TypeError, RuntimeError: as `Linear`.
        """
        norm_weight, norm_bias = self.layer_norm_weight, self.layer_norm_bias
        ready = self.prepare(inp, is_first_microbatch, also_trained=(residual, norm_weight, norm_bias))
        added = residual_matrix(residual, inp, ready.x.dtype, self)
        spec = _Spec(self.norm, ready.call, self.return_layernorm_output)
        out, normalized, summed = _LayerNormLinear.apply(
            ready.x, added, norm_weight, norm_bias, ready.weight, ready.added_bias, ready.operand, spec
        )
        out = out.view(ready.out_shape)
        return self._results(out, ready.bias, normalized, summed, inp, return_residual=return_residual)


@dataclass(slots=True)
class _Spec:
    """What one call of the node needs besides tensors.

    Attributes:
        keep: whether norm(x) is a result, too.
    """

    norm: NormKind
    call: LinearCall
    keep: bool


class _LayerNormLinear(torch.autograd.Function):
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
        spec: _Spec,
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
