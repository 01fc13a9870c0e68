"""`LayerNormLinear`: a norm and a linear layer as one autograd node; in FP8 the norm's kernel also casts.

In:   [..., in_features];  out: [..., out_features].
Next: `layers/attention/multihead.py` uses it for query, key and value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import norm_linear, prepare
from flatfsdp.layers.layer_options import LinearOptions
from flatfsdp.layers.norm_first import NormFirst
from flatfsdp.layers.normalized import NormKind
from flatfsdp.layers.projection import Projection
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.torch_private import never_traced


class LayerNormLinear(NormFirst, Projection):
    """A norm and a linear map: y = norm(x) w^T + b, or norm(x + residual) w^T + b.

    Args:
        in_features: size of the input; a multiple of 16 for FP8.
        out_features: size of the output; a multiple of 16 for FP8.
        eps: epsilon of the norm.
        bias: whether the linear map has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's gain is 1 + its weight.
        return_layernorm_output: return norm(x) as well.
        options: the further options of `Linear`, listed in `LinearOptions`; parallel_mode cannot be "row".

    Attributes:
        layer_norm_weight, layer_norm_bias: [in_features]; RMSNorm has no bias.
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Raises:
        ValueError: if options contradict each other, or a size does not divide evenly over the ranks.
    """

    @takes_te_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
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

    @never_traced
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Normalizes and multiplies: [..., in_features] to [..., out_features] of this rank.

        Args:
            inp: [..., in_features].
            is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every
                time.
            residual: of inp's shape; the norm adds it to `inp` in the same pass.
            return_residual: return `inp`, or inp + residual, as well, for a residual connection around this
                layer: its gradient is then added inside the norm's backward.  Under torch.autocast it has
                autocast's dtype.

        Returns:
            out, or a tuple of out, the bias (`return_bias`), the norm's result (`return_layernorm_output`)
            and the norm's input (`return_residual`).

        Raises:
            ValueError: if a shape does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of the weight is kept.
        """
        bias = self._whole("bias")
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        called = norm_linear(
            prepare(self, inp, of, is_first_microbatch=is_first_microbatch),
            self._norm_of(),
            residual=residual,
            keep=self.return_layernorm_output,
        )
        return self._results(called, bias, inp, return_residual=return_residual)
