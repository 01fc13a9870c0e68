"""`LayerNormLinear`: a norm and a linear layer as one autograd node; in FP8 the norm casts its own result.

In:   [..., in_features];  out: [..., out_features].
Next: `layers/attention/multihead.py` has one for query, key and value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import norm_linear, prepare
from flatfsdp.layers.norm_first import NormFirst
from flatfsdp.layers.normalized import NormKind
from flatfsdp.layers.options import LinearOptions
from flatfsdp.layers.projection import Projection
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.torch_private import never_traced


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

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_norm()

    @never_traced
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
        bias = self._whole_bias()
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        called = norm_linear(
            self,
            self._norm_of(),
            of,
            prepare(self, inp, of),
            residual=residual,
            keep=self.return_layernorm_output,
            is_first_microbatch=is_first_microbatch,
        )
        return self._results(called, bias, inp, return_residual=return_residual)
