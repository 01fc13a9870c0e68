"""`NormFirst`: the base of layers that normalize their input before their linear maps.

Next: `layernorm_linear.py` and `layernorm_mlp.py`; `calls.py` computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.tensor_parallel import declare_norm
from flatfsdp.layers.calls import Called, NormOf
from flatfsdp.layers.normalized import NormKind, reset_norm
from flatfsdp.layers.projection import OwnMaps


class NormFirst(OwnMaps):
    """A layer with linear maps that begins with a norm.

    Attributes:
        norm: kind of norm.
        layer_norm_weight, layer_norm_bias: [features]; RMSNorm has no bias.
        return_bias: whether a call returns the bias instead of adding it.
        return_layernorm_output: whether a call returns norm(x) as well.
    """

    return_bias: bool
    return_layernorm_output: bool

    def _add_norm(self, features: int, kind: NormKind) -> None:
        """Makes the norm's parameters; call it where they belong in the order of parameters."""
        self.norm = kind
        self.layer_norm_bias: nn.Parameter | None
        self.layer_norm_weight = self._new_parameter(features)
        self.register_parameter("layer_norm_bias", None if kind.rms else self._new_parameter(features))
        declare_norm(self._parallel, self.layer_norm_weight, self.layer_norm_bias)

    def _norm_of(self) -> NormOf:
        return NormOf(self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def reset_parameters(self) -> None:
        """Initialises the parameters in place; does nothing on the meta device."""
        super().reset_parameters()
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.norm.zero_centered)

    def _results(
        self,
        called: Called,
        bias: Tensor | None,
        inp: Tensor,
        *,
        return_residual: bool,
    ) -> Any:
        """Returns `out`, or a tuple of it and the further results that the layer and the call ask for."""
        out, normalized, summed = called
        results: list[Tensor | None] = [out]
        if self.return_bias:
            results.append(None if bias is None else bias.to(out.dtype))
        if normalized is not None:
            results.append(normalized.view(inp.shape))
        if return_residual:
            results.append(summed.view(inp.shape))
        return out if len(results) == 1 else tuple(results)
