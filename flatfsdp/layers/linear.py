"""`Linear`: nn.Linear with optional FP8 GEMMs and FP32 accumulation of the weight gradient.

In:   [..., in_features];  out: [..., out_features].
Next: `calls.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import linear, prepare
from flatfsdp.layers.layer_options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.torch_private import never_traced


class Linear(Projection):
    """A linear layer, y = x w^T + b.  Drop-in for nn.Linear, with Transformer Engine's arguments.

    Inside `flatfsdp.fp8.autocast` its GEMMs run in FP8; input, output and parameters keep their dtypes.

    Args:
        in_features: size of the input; a multiple of 16 for FP8.
        out_features: size of the output; a multiple of 16 for FP8.
        bias: whether there is a bias.
        options: further options, listed in `LinearOptions`.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Raises:
        ValueError: if options contradict each other, or a size does not divide evenly over the ranks.
    """

    @takes_te_arguments
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.reset_parameters()

    @never_traced
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Computes x w^T + b: [..., in_features] to this rank's [..., out_features].

        With `return_bias` the result is (x w^T, bias).

        Args:
            inp: [..., in_features].
            is_first_microbatch: True (the first microbatch of a step) casts the FP8 weight and keeps it,
                False reuses it, None casts in every call.  True also overwrites a plain `main_grad`.

        Raises:
            ValueError: if the input's size does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of the weight is kept.
        """
        bias = self._whole("bias")
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        out = linear(prepare(self, inp, of, is_first_microbatch=is_first_microbatch))
        if not self.return_bias:
            return out
        return out, None if bias is None else bias.to(out.dtype)
