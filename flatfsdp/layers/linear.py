"""`Linear`: nn.Linear with FP8 GEMMs and the weight gradient accumulated in FP32.

In:   [..., in_features];  out: [..., out_features].
Next: `calls.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.claimed import taken_from
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import linear, prepare
from flatfsdp.layers.options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.matmul.linear_map import FuseWgrad


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
        cls, module: nn.Linear, name: str, allows_fp8: bool, fuse_wgrad_accumulation: FuseWgrad
    ) -> Linear:
        """A layer that has `module`'s own parameters.

        Raises:
            ValueError: if it is sharded already, or has hooks; the new layer would not call them.
        """
        sharded = f"convert: {name}.weight is sharded already; convert first, then shard or wrap the model"
        if "weight" in taken_from(module):
            raise ValueError(sharded)
        hooks = [key for key, value in vars(module).items() if key.endswith("_hooks") and value]
        if hooks:
            raise ValueError(
                f"convert: {name} has module hooks ({', '.join(hooks)}); register them after the conversion"
            )
        if module._parameters.get("weight") is None:
            raise ValueError(sharded)
        layer = cls(
            module.in_features,
            module.out_features,
            module.bias is not None,
            device="meta",
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        layer.weight, layer.bias = module.weight, module.bias
        layer.allows_fp8 = allows_fp8
        return layer.train(module.training)

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
        bias = self._whole_bias()
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        out = linear(self, of, prepare(self, inp, of), is_first_microbatch=is_first_microbatch)
        if not self.return_bias:
            return out
        return out, None if bias is None else bias.to(out.dtype)
