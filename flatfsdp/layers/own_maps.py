"""Layers that make the parameters of their linear maps: `OwnMaps`, and `NormFirst` for those with a norm.

Next: `linear.py` and `layernorm_mlp.py`; `calls.py` computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.tensor_parallel import SKIP_BACKWARD_POST_HOOK, Mode, declare_map, declare_norm
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.calls import Called, NormOf
from flatfsdp.layers.layer_options import MatmulOptions
from flatfsdp.layers.normalized import NormKind, reset_norm
from flatfsdp.layers.shared import InitMethod, initialize, new_parameter, normal_init


class OwnMaps(MatmulLayer):
    """A layer that makes the parameters of its linear maps, instead of reading those of another model.

    Args:
        options: options of every layer with linear maps, listed in `MatmulOptions`.
    """

    def __init__(self, **options: Unpack[MatmulOptions]) -> None:
        super().__init__(**options)
        self._init_methods: dict[str, InitMethod] = {}

    def _new_parameter(self, *shape: int) -> nn.Parameter:
        """Makes an uninitialised parameter for the constructor."""
        return new_parameter(*shape, dtype=self._params_dtype, device=self._params_device)

    def _add_map(
        self,
        prefix: str,
        shape: tuple[int, int],
        bias: bool,
        mode: Mode | None,
        sizes: tuple[int, ...],
        init_method: InitMethod | None,
    ) -> None:
        """Makes the weight and bias of a linear map, or of some of its rows.

        Args:
            prefix: of their names.
            shape: of this rank's weight.
            bias: whether there is one.
            mode: "column", "row" or None.
            sizes: sizes of the parts of the split dimension, over all ranks.
            init_method: fills the weight in place; None: `normal_init`.
        """
        weight = self._new_parameter(*shape)
        added = self._new_parameter(shape[0]) if bias else None
        declare_map(self._parallel, mode, weight, added, sizes)
        if self._delayed_wgrads is not None:
            SKIP_BACKWARD_POST_HOOK.leave(weight, True)
        self.register_parameter(f"{prefix}weight", weight)
        self.register_parameter(f"{prefix}bias", added)
        self._init_methods[prefix] = init_method or normal_init

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters in place; does nothing on the meta device."""
        for prefix, init_method in self._init_methods.items():
            weight, bias = getattr(self, f"{prefix}weight"), getattr(self, f"{prefix}bias")
            if not weight.is_meta:
                initialize(weight, init_method, self._parallel.ranks)
                if bias is not None:
                    bias.zero_()


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
