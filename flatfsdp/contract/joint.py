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
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.claimed import taken_from
from flatfsdp.torch_private import nodes_behind, receives_gradient


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


DECLARED_JOINTS = Attribute[Callable[[], tuple[Joint, ...]]]("declared_joints", tuple[Joint, ...])
"""A layer's method: what it would like to read as one operand.

`fp8_weights()` of the layer may name a joint, also one of a single part: then nobody reads its parts but this
layer, and in FP8, so that they may be kept in FP8 although other modules hold them.
"""

JOINT_PARTS = Attribute[tuple[Tensor, ...]]("joint_parts", ())
"""Left on an engine's joint tensor: the parts, whose gradients the backward is asked for.  They are the last
inputs, in this order, of what the tensor was computed by."""


Get = Callable[[], Tensor | None]
"""Gives a joint's tensor; None while the parts are ordinary parameters, as in `summon_full_params`."""


class _Getters(dict[str, Get]):
    """What gives a layer its joints, by their names.  A copy of the layer has parameters of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Getters:
        return _Getters()

    def __reduce__(self) -> tuple[type[_Getters], tuple[()]]:
        return _Getters, ()


_GETTERS = "_flatfsdp_joined"


def leave_joined(layer: nn.Module, name: str, get: Get) -> None:
    """Gives `layer` its joint `name`: from now on `joined` returns what `get` does."""
    vars(layer).setdefault(_GETTERS, _Getters())[name] = get


def is_joined(layer: nn.Module, name: str) -> bool:
    """Whether an engine has put the parts of this joint side by side."""
    return name in vars(layer).get(_GETTERS, ())


def joined(layer: nn.Module, joint: Joint) -> Tensor | None:
    """The parts one below the other: [sum of rows, columns], or [sum of elements] for biases.

    Returns:
        The engine's tensor, or a concatenation if no engine has the parts.  None if one has them, but not
        side by side: they are in several units, frozen beside trained, or of several dtypes.
    """
    get: Get | None = vars(layer).get(_GETTERS, {}).get(joint.name)
    tensor = None if get is None else get()
    if tensor is not None:
        return tensor
    if len(joint.parts) == 1:
        return joint.tensors()[0]
    if any(_is_engines(module, attribute) for module, attribute in joint.parts):
        return None
    return torch.cat(joint.tensors())


def _is_engines(module: nn.Module, attribute: str) -> bool:
    """Whether an engine has put something in the place of a parameter, and it is there now."""
    return attribute in taken_from(module) and attribute in vars(module)


class Wanted(Enum):
    """The parts of a weight whose gradients the running backward asks for."""

    ALL = "all"
    SOME = "some"
    NONE = "none"


def wanted_grads(weight: Tensor) -> Wanted:
    """What the running backward asks for: of a joint, of its parts; of any other weight, all or none.

    `autograd.grad` and `backward(inputs=...)` may ask for some parts; parts may be frozen after the forward.
    """
    parts = JOINT_PARTS.of(weight)
    if not parts:
        return Wanted.ALL if receives_gradient(weight) else Wanted.NONE
    nodes = nodes_behind(weight, len(parts))
    wanted = [receives_gradient(part, node) for part, node in zip(parts, nodes, strict=True)]
    if all(wanted):
        return Wanted.ALL
    return Wanted.SOME if any(wanted) else Wanted.NONE
