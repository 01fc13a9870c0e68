"""`FusedMLP`: norm, both linear maps and the activation between them as one autograd node.

In:   [batch, seq, hidden], before the norm, optionally with a residual to add first.
Next: `layer.py` adds the result to the norm's input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.half import FusedHalf
from flatfsdp.compat.transformers.fused.operands import operands_of, packs_of
from flatfsdp.compat.transformers.fused.small import norm_of
from flatfsdp.compat.transformers.fused.why_not import (
    NOT_SIDE_BY_SIDE,
    different,
    no_linear,
    skipping,
)
from flatfsdp.contract.mixed import innermost
from flatfsdp.contract.packed import Pack
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import norm_mlp, prepare

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "NewGELUActivation": "gelu",
    "FastGELUActivation": "gelu",
    "GELUTanh": "gelu",
    "PytorchGELUTanh": "gelu",
    "ReLU": "relu",
}
"""Our activations by classes of PyTorch and transformers; exact GELU, with erf, is not among them."""

_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


class MLPMaps(NamedTuple):
    """The linear maps and the activation of one call."""

    first: MapOf
    second: MapOf
    activation: str


class FusedMLP(FusedHalf):
    """The MLP of a layer of transformers; a direct call runs transformers' own forward."""

    linear_maps = ("fc1", "fc2")
    dropout_index = 1

    def packed_parameters(self) -> tuple[Pack, ...]:
        """The packed weight and bias of gate and linear part, and the second map's weight."""
        if self._reason() is not None:
            return ()
        return (*self._first_packs(), *packs_of("down", [self._second()])[:1])

    def maps(self, norm: nn.Module) -> MLPMaps | str:
        """The linear maps of this call, or the reason why transformers has to compute it."""
        checked = self._check(norm)
        if checked.reason is not None:
            return checked.reason
        family, second = self._family, self._second()
        operands = operands_of(self, checked.packs)
        if operands is None:
            return f"{', '.join(family.gate_up)} {NOT_SIDE_BY_SIDE}"
        activation = _ACTIVATIONS[innermost(type(self._activation())).__name__]
        return MLPMaps(
            MapOf("fc1", *operands, family.transposed),
            MapOf("fc2", second.weight, second.bias, family.transposed),
            _GATED[activation] if len(family.gate_up) == 2 else activation,
        )

    def run(
        self, hidden_states: Tensor, residual: Tensor | None, norm: nn.Module, maps: MLPMaps
    ) -> tuple[Tensor, Tensor]:
        """Computes the branch; also returns the norm's input, hidden_states + residual."""
        called = norm_mlp(
            prepare(self, hidden_states, maps.first, maps.second),
            norm_of(norm),
            maps.activation,
            residual=residual,
        )
        return called.out, called.summed.view(hidden_states.shape)

    # ---- parts ------------------------------------------------------------------------------------------

    def _first(self) -> list[Any]:
        return [self._modules[name] for name in self._family.gate_up]

    def _second(self) -> Any:
        return self._modules[self._family.down]

    def _activation(self) -> Any:
        return self._modules[self._family.activation]

    def _first_packs(self) -> tuple[Pack, ...]:
        return packs_of("gate_up", self._first())

    def _others(self) -> list[nn.Module]:
        return [self._activation()]

    def _reason(self) -> str | None:
        family, first = self._family, self._first()
        maps = zip((*family.gate_up, family.down), (*first, self._second()), strict=True)
        for name, module in maps:
            if found := no_linear(name, module, transposed=family.transposed):
                return found
        named = ", ".join(family.gate_up)
        if len({each.bias is None for each in first}) > 1:
            return f"some of {named} have a bias, others none"
        activation = innermost(type(self._activation())).__name__
        if activation not in _ACTIVATIONS:
            return f"the activation is {activation}, which has no kernel here"
        return (
            different(named, [each.weight for each in first])
            or skipping("the activation", self._activation())
            or skipping("it", self)
            or self._dropout_reason()
        )
