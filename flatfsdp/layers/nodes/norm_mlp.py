"""A norm, two linear maps and the activation between them as one autograd node.

In:   x [tokens, hidden], optionally a residual to add first, and the parameters of norm and maps.
Next: `normalized.py` has the norm, `matmul/linear_map.py` the GEMMs.

    forward    norm -> (cast) -> fc1 -> activation -> (cast) -> fc2
    saved      norm's input and statistics; FP8 operands of both maps; fc1's result before the activation
    backward   fc2's gradients; one pass: the activation's gradient, cast, transpose, fc1's bias gradient;
               fc1's gradients; the norm's gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.fp8.quantizers import Quantized
from flatfsdp.kernels.activation import activation_backward, activation_forward
from flatfsdp.layers.normalized import NormKind, NormSaved, add_to, cast_by, input_grads, normalize
from flatfsdp.matmul.linear_map import LinearCall, LinearSaved, linear_backward, linear_forward, quantize_grad
from flatfsdp.torch_private import Function, once_differentiable


@dataclass(slots=True)
class NormMLPSpec:
    """The arguments of one call besides its tensors.

    Attributes:
        norm: kind of norm.
        activation: a name in `flatfsdp.kernels.activation.NAMES`.
        checkpoint: whether backward recomputes norm, fc1 and activation.
        keep: whether to return norm(x) as well.
        fc1, fc2: the linear maps.
    """

    norm: NormKind
    activation: str
    checkpoint: bool
    keep: bool
    fc1: LinearCall
    fc2: LinearCall

    def again(self) -> NormMLPSpec:
        """The same call for recomputation in backward."""
        return replace(self, keep=False, fc1=self.fc1.again(), fc2=self.fc2.again())


def _before_fc2(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Operand,
    fc1_bias: Tensor | None,
    spec: NormMLPSpec,
) -> tuple[Tensor | None, NormSaved, Tensor, LinearSaved, Operand]:
    """Returns norm(x) if requested, what backward needs of norm and fc1, and the input of fc2."""
    normalized, kept, norm = normalize(x, residual, norm_weight, norm_bias, spec.norm, spec.fc1, spec.keep)
    fc1_out, fc1 = linear_forward(normalized, fc1_weight, fc1_bias, spec.fc1)
    quantizer, columnwise = spec.fc2.input_quantizer, spec.fc2.wants_columnwise_input
    activated, _ = cast_by(
        activation_forward, fc1_out, spec.activation, quantizer=quantizer, columnwise=columnwise
    )
    return kept, norm, fc1_out, fc1, activated


class NormMLPNode(Function):
    """Autograd node of norm and MLP; returns the result, norm(x) if requested, and the norm's input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        fc1_param: Tensor,
        fc1_bias: Tensor | None,
        fc2_param: Tensor,
        fc2_bias: Tensor | None,
        fc1_weight: Operand,
        fc2_weight: Operand,
        spec: NormMLPSpec,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Applies norm, fc1, activation and fc2."""
        kept, norm, fc1_out, fc1, activated = _before_fc2(
            x, residual, norm_weight, norm_bias, fc1_weight, fc1_bias, spec
        )
        out, fc2 = linear_forward(activated, fc2_weight, fc2_bias, spec.fc2)
        ctx.spec = spec
        # A result that nothing used has no gradient; zeros in its place would cost memory and a pass.
        ctx.set_materialize_grads(False)
        if spec.checkpoint:
            ctx.save_for_backward(norm[0], norm_weight, norm_bias, fc1_bias, *fc1_weight, *fc2.weight)
        else:
            # Backward stops early where everything before fc1, or before fc2, is frozen.
            ctx.save_for_backward(
                *(norm if spec.fc1.needs_input_grad else (None,) * 4),
                fc1_out if spec.fc2.needs_input_grad else None,
                *fc1.tensors,
                *fc2.tensors,
            )
        return out, kept, norm[0]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnormalized: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, residual and parameters."""
        spec: NormMLPSpec = ctx.spec.again() if ctx.spec.checkpoint else ctx.spec
        norm, fc1_out, fc1, fc2 = _saved(ctx.saved_tensors, spec)
        fc1_dweight = fc1_dbias = fc2_dweight = fc2_dbias = None
        if dy is not None:
            quantized = quantize_grad(dy, spec.fc2)
            dactivated, fc2_dweight, fc2_dbias = linear_backward(quantized, fc2, spec.fc2, ctx)
            if dactivated is not None:
                assert fc1_out is not None
                quantized = _activation_backward(dactivated, fc1_out, spec)
                dx, fc1_dweight, fc1_dbias = linear_backward(quantized, fc1, spec.fc1, ctx)
                dnormalized = add_to(dx, dnormalized)
        maps = (fc1_dweight, fc1_dbias, fc2_dweight, fc2_dbias)
        grads = input_grads(dnormalized, norm, spec.norm, dresidual, has_residual=ctx.needs_input_grad[1])
        return *grads, *maps, None, None, None


def _saved(
    tensors: Sequence[Tensor | None], spec: NormMLPSpec
) -> tuple[Sequence[Tensor | None], Tensor | None, LinearSaved, LinearSaved]:
    """Tensors that were saved, or are recomputed; None where not needed.

    Returns:
        The norm's input, weight, mean and rstd; fc1's result; what each map needs.
    """
    if not spec.checkpoint:
        norm, fc1_out, maps = tensors[:4], tensors[4], tensors[5:]
        middle = len(maps) // 2
        return norm, fc1_out, LinearSaved.of(maps[:middle]), LinearSaved.of(maps[middle:])
    x, norm_weight, norm_bias, fc1_bias, *weights = tensors
    assert x is not None and norm_weight is not None
    middle = len(weights) // 2
    fc1_weight, fc2_weight = Operand(*weights[:middle]), Operand(*weights[middle:])
    # Without the residual: x is the norm's input, to which it was added.
    _, norm, fc1_out, fc1, activated = _before_fc2(
        x, None, norm_weight, norm_bias, fc1_weight, fc1_bias, spec
    )
    return norm, fc1_out, fc1, LinearSaved(activated.for_backward, fc2_weight)


def _activation_backward(dy: Tensor, x: Tensor, spec: NormMLPSpec) -> Quantized:
    """The gradient of fc1's result as an operand, with its column sums for fc1's bias."""
    call, quantizer = spec.fc1, spec.fc1.grad_quantizer()
    needs_product = call.needs_input_grad or call.needs_weight_grad
    fused = quantizer.fused if needs_product else None
    grads = activation_backward(
        dy,
        x,
        spec.activation,
        high_precision=fused is None,
        rowwise=call.needs_input_grad,
        columnwise=call.needs_weight_grad and fused is not None,
        column_sum=call.bias_grad,
        **(fused or {}),
    )
    if fused is not None:
        return Quantized(quantizer.operand(grads.rowwise, grads.columnwise), grads.column_sum)
    if not needs_product:
        return Quantized(Operand(), grads.column_sum)
    assert grads.dx is not None
    cast = quantizer.cast(grads.dx, rowwise=call.needs_input_grad, columnwise=call.needs_weight_grad)
    return cast._replace(column_sum=grads.column_sum)
