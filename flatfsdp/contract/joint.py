"""Several parameters that one GEMM reads as one operand: query, key and value; gate and up.

A layer says which (`joints()`); an engine that has put them side by side gives it one tensor over them.  What
is no neighbour of the others in memory is concatenated, or multiplied by itself.

    q_proj.weight [q, n]  |
    k_proj.weight [k, n]  |  qkv_weight [q + k + v, n]
    v_proj.weight [v, n]  |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.claimed import taken_from


@dataclass(frozen=True)
class Joint:
    """Parameters that are one operand.

    Attributes:
        name: unique in the layer that multiplies with it.
        parts: (module, attribute) of each, in the order of their rows.
    """

    name: str
    parts: tuple[tuple[nn.Module, str], ...]

    def tensors(self) -> list[Tensor]:
        """What the modules have now."""
        return [getattr(module, attribute) for module, attribute in self.parts]


JOINTS = Attribute[Callable[[], tuple[Joint, ...]]]("joints", tuple[Joint, ...])
"""A layer's method: what it would like to read as one operand."""

JOINT_PARTS = Attribute[tuple[Tensor, ...]]("joint_parts", ())
"""Left on an engine's joint tensor: the parts, whose gradients the backward is asked for."""

_GETTERS = Attribute[tuple[int, dict[str, Callable[[], Tensor]]] | None]("_flatfsdp_joined", None)


def leave_joined(layer: nn.Module, name: str, get: Callable[[], Tensor]) -> None:
    """Gives `layer` its joint `name`: from now on `joined` returns what `get` does."""
    # By its address: a copy of the layer, pickled or not, has parameters of its own.
    address, getters = vars(layer).get(_GETTERS.name, (None, {}))
    if address != id(layer):
        getters = {}
    vars(layer)[_GETTERS.name] = (id(layer), {**getters, name: get})


def is_joined(layer: nn.Module, name: str) -> bool:
    """Whether an engine has put the parts of this joint side by side."""
    return _getter(layer, name) is not None


def joined(layer: nn.Module, joint: Joint) -> Tensor | None:
    """The parts one below the other: [sum of rows, columns], or [sum of elements] for biases.

    Returns:
        The engine's tensor, or a concatenation if no engine has the parts.  None if one has them, but not
        side by side: they are in several units, frozen beside trained, or of several dtypes.
    """
    get = _getter(layer, joint.name)
    if get is not None:
        return get()
    if len(joint.parts) == 1:
        return joint.tensors()[0]
    if any(attribute in taken_from(module) for module, attribute in joint.parts):
        return None
    return torch.cat(joint.tensors())


def _getter(layer: nn.Module, name: str) -> Callable[[], Tensor] | None:
    address, getters = vars(layer).get(_GETTERS.name, (None, {}))
    return getters.get(name) if address == id(layer) else None
