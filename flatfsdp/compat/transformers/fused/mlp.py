"""`FusedMLP`: norm, both linear maps and the activation between them as one autograd node.

In:   [batch, seq, hidden], before the norm, optionally with a residual to add first.
Next: `layer.py` adds the result to the norm's input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.half import FusedHalf, HalfMaps
from flatfsdp.compat.transformers.fused.small import norm_of
from flatfsdp.compat.transformers.fused.why_not import no_linear, skipping
from flatfsdp.contract.mixed import innermost
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


class FusedMLP(FusedHalf):
    """The MLP of a layer of transformers; a direct call runs transformers' own forward."""

    linear_maps = ("fc1", "fc2")
    first_at, second_at, dropout_index = "gate_up", "down", 1

    def run(
        self, hidden_states: Tensor, residual: Tensor | None, norm: nn.Module, maps: HalfMaps
    ) -> tuple[Tensor, Tensor]:
        """Computes the branch; also returns the norm's input, hidden_states + residual."""
        assert maps.second is not None
        activation = _ACTIVATIONS[innermost(type(self._activation())).__name__]
        called = norm_mlp(
            prepare(self, hidden_states, maps.first, maps.second),
            norm_of(norm),
            _GATED[activation] if len(self._family.gate_up) == 2 else activation,
            residual=residual,
        )
        return called.out, called.summed.view(hidden_states.shape)

    def _activation(self) -> Any:
        return self._modules[self._family.activation]

    def _others(self) -> list[nn.Module]:
        return [self._activation()]

    def _own_reason(self) -> str | None:
        activation = innermost(type(self._activation())).__name__
        if activation not in _ACTIVATIONS:
            return f"the activation is {activation}, which has no kernel here"
        return no_linear(self._family.down, self._second(), transposed=self._family.transposed) or skipping(
            "the activation", self._activation()
        )
