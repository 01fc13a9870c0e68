"""`Linear`: nn.Linear with FP8 GEMMs and the weight gradient accumulated in FP32.

In:   [..., in_features];  out: [..., out_features].
Next: `matmul/linear_map.py` has the primitive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from flatfsdp.contract.operand import Operand
from flatfsdp.layers.options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.matmul.linear_map import (
    FuseWgrad,
    LinearCall,
    LinearSaved,
    linear_backward,
    linear_forward,
    quantize_grad,
)


class Linear(Projection):
    """y = x w^T + b.  Drop-in for nn.Linear, with Transformer Engine's arguments.

    Inside `flatfsdp.fp8.autocast` GEMMs are in FP8; input, output and parameters keep their dtype.

    Args:
        in_features, out_features: sizes; multiples of 16 for FP8.
        bias: whether there is a bias.
        options: see `LinearOptions`.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Raises:
        ValueError: if options contradict each other, or ranks cannot share a size equally.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.reset_parameters()

    @classmethod
    def sharing(
        cls, linear: nn.Linear, name: str, allows_fp8: bool, fuse_wgrad_accumulation: FuseWgrad
    ) -> Linear:
        """A layer that has `linear`'s own parameters.

        Raises:
            ValueError: if it has hooks; the new layer would not call them.
        """
        hooks = [key for key, value in vars(linear).items() if key.endswith("_hooks") and value]
        if hooks:
            raise ValueError(
                f"convert: {name} has module hooks ({', '.join(hooks)}); register them after the conversion"
            )
        if linear._parameters.get("weight") is None:
            raise ValueError(
                f"convert: {name}.weight is sharded already; convert first, then shard or wrap the model"
            )
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.allows_fp8 = allows_fp8
        return layer.train(linear.training)

    @torch.compiler.disable
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., in_features] to [..., out_features], of this rank's part; with `return_bias`, (that, bias).

        Args:
            is_first_microbatch: FP8 weights are cast in every call (None), or in the first microbatch of a
                step (True) and then reused (False).  A plain `main_grad` is overwritten by True.

        Raises:
            ValueError: if the input's size does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or see `WeightCache.operand`.
        """
        ready = self.prepare(inp, is_first_microbatch)
        out = _Linear.apply(ready.x, ready.weight, ready.added_bias, ready.operand, ready.call)
        out = out.view(ready.out_shape)
        if not self.return_bias:
            return out
        return out, None if ready.bias is None else ready.bias.to(out.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operand: Operand,
        call: LinearCall,
    ) -> Tensor:
        quantized = call.input_quantizer.cast(x, rowwise=True, columnwise=call.wants_columnwise_input)
        out, saved = linear_forward(quantized.operand, operand, bias, call)
        ctx.call = call
        ctx.save_for_backward(*saved.tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = LinearSaved.of(ctx.saved_tensors)
        dx, dweight, dbias = linear_backward(quantize_grad(dy, ctx.call), saved, ctx.call)
        return dx, dweight, dbias, None, None
