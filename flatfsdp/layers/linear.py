"""`Linear`: nn.Linear with FP8 GEMMs and the weight gradient accumulated in FP32.

In:   [..., in_features];  out: [..., out_features].
Next: `calls.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import linear, prepare
from flatfsdp.layers.options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.torch_private import never_traced


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

    @takes_te_arguments
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.reset_parameters()

    @never_traced
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
