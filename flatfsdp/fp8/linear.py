"""The linear primitive: what `Linear`, `LayerNormLinear` and `LayerNormMLP` are made of.

In:   the input as an `Operand` (a norm or an activation may have cast it already), weight and bias.
Out:  forward the product, and what to save; backward the gradients of input, weight and bias.
Next: `layers/` composes it with norms and activations inside one autograd Function each.

    forward    x -> Operand    (cast here, or by the kernel that made x)
               w -> Operand    once a call, or once a step (`FP8Module.weight_operand`)
               y = x w^T + b
    saved      x for wgrad, w for dgrad: FP8, one byte an element each; a bf16 weight itself
    backward   dy -> Operand   (cast, transposed and summed for the bias in one pass)
               dx = dy w,  dw = dy^T x, accumulated into main_grad or returned
               without FP8 the product dy^T x sums dy for the bias
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatfsdp.autograd import receives_gradient
from flatfsdp.fp8 import products
from flatfsdp.fp8.main_grad import claim
from flatfsdp.fp8.operand import Operand
from flatfsdp.fp8.quantizers import Quantized, Quantizer, Unquantized
from flatfsdp.fp8.recipe import SplitAccumulator

FuseWgrad = bool | Literal["two_pass"]
"""Whether a layer adds its weight gradient to main_grad itself; "two_pass": in an FP32 product and an
addition, for comparison, rather than in the product."""


def checked_fuse_wgrad(value: FuseWgrad, layer: str) -> FuseWgrad:
    """
    Raises:
        ValueError: if it is none of the three.
    """
    if value not in (True, False, "two_pass"):
        raise ValueError(
            f"{layer}: fuse_wgrad_accumulation is {value!r}; it must be True, False or 'two_pass'"
        )
    return value


@dataclass(slots=True)
class LinearCall:
    """One call of one linear map; what forward and backward need besides tensors.

    Attributes:
        name: of the weight, for messages.
        weight: the parameter to whose main_grad the gradient goes; None without `fuse_wgrad`.
        dtype: of activations and their gradients.
        grad_quantizer: makes the quantizer of dy, when backward comes to it.
        needs_input_grad, needs_weight_grad, needs_bias_grad: what is to be computed in backward.
    """

    name: str
    weight: Tensor | None
    weight_dtype: torch.dtype
    dtype: torch.dtype
    split: SplitAccumulator
    grad_quantizer: Callable[[], Quantizer]
    fuse_wgrad: FuseWgrad
    is_first_microbatch: bool | None
    needs_input_grad: bool
    needs_weight_grad: bool
    needs_bias_grad: bool


class LinearSaved(NamedTuple):
    """What backward reads.

    Attributes:
        x: for wgrad; empty if the weight gets no gradient.
        weight: for dgrad; empty if the input gets no gradient.
    """

    x: Operand
    weight: Operand

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """For `ctx.save_for_backward`."""
        return (*self.x, *self.weight)

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> LinearSaved:
        """From what `ctx.saved_tensors` gives back of `tensors`."""
        middle = len(tensors) // 2
        return LinearSaved(Operand(*tensors[:middle]), Operand(*tensors[middle:]))


def linear_forward(
    x: Operand, weight: Operand, bias: Tensor | None, call: LinearCall
) -> tuple[Tensor, LinearSaved]:
    """x w^T + b, [tokens, out] in call.dtype."""
    added = None if bias is None else bias.to(call.dtype)
    out = products.fprop(x, weight, added, call.dtype, call.split)
    nothing = Operand()
    return out, LinearSaved(
        x.for_backward if call.needs_weight_grad else nothing,
        weight.for_backward if call.needs_input_grad else nothing,
    )


def quantize_grad(dy: Tensor, call: LinearCall) -> Quantized:
    """dy [tokens, out] as an Operand, empty if no product needs it, and its column sums for the bias.

    There are no sums where the product of the weight's gradient makes them.
    """
    if not (call.needs_input_grad or call.needs_weight_grad):
        return Quantized(Operand(), dy.sum(0, dtype=torch.float32) if call.needs_bias_grad else None)
    quantizer = call.grad_quantizer()
    product_sums = call.needs_weight_grad and isinstance(quantizer, Unquantized)
    return quantizer.cast(
        dy.contiguous(),
        rowwise=call.needs_input_grad,
        columnwise=call.needs_weight_grad,
        column_sum=call.needs_bias_grad and not product_sums,
    )


class LinearGrads(NamedTuple):
    """What backward returns; None: not needed.

    Attributes:
        x: [tokens, in], in call.dtype.
        weight: [out, in], in the weight's dtype; None once it is in main_grad.
        bias: FP32 [out].
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_backward(dy: Quantized, saved: LinearSaved, call: LinearCall) -> LinearGrads:
    """Gradients of input, weight and bias; the last one is in `dy`, or comes with the weight's."""
    operand, dbias = dy
    dx = products.dgrad(operand, saved.weight, call.dtype, call.split) if call.needs_input_grad else None
    sums = None
    if call.needs_bias_grad and dbias is None:
        assert operand.high is not None
        sums = dbias = operand.high.new_empty(operand.high.shape[1], dtype=torch.float32)
    dweight = weight_grad(operand, saved.x, sums, call) if call.needs_weight_grad else None
    return LinearGrads(dx, dweight, dbias)


def weight_grad(dy: Operand, x: Operand, bias_grad: Tensor | None, call: LinearCall) -> Tensor | None:
    """The weight's gradient in its dtype, or None: it is in main_grad, or this backward does not ask for it.

    Args:
        bias_grad: not FP8: FP32 [out], becomes the column sums of dy.
    """
    if call.weight is None:
        return products.wgrad(dy, x, call.weight_dtype, call.split, bias_grad=bias_grad)
    if not receives_gradient(call.weight):
        if bias_grad is not None and dy.high is not None:
            torch.sum(dy.high, 0, dtype=torch.float32, out=bias_grad)
        return None
    slot = claim(call.weight, call.name, call.is_first_microbatch)
    products.accumulate_wgrad(
        slot.target,
        dy,
        x,
        call.split,
        first=slot.first,
        two_passes=call.fuse_wgrad == "two_pass",
        bias_grad=bias_grad,
    )
    return None
