"""`Pack`: packed parameters, which one GEMM reads as one operand: query, key and value; gate and up.

A layer declares its packs; an engine that has packed their parts side by side gives it one tensor over them.
Parts that are not neighbours in memory are concatenated, or multiplied separately.

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
from torch.autograd.graph import Node

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.claimed import taken_from
from flatfsdp.torch_private import node_after, nodes_behind, receives_gradient


@dataclass(frozen=True)
class Pack:
    """Parameters that are one GEMM operand.

    Attributes:
        name: name of the pack, unique in the layer that multiplies with it.
        parts: (module, attribute) of each parameter, in the order of their rows.
    """

    name: str
    parts: tuple[tuple[nn.Module, str], ...]

    def tensors(self) -> list[Tensor]:
        """The tensors that the modules have now."""
        return [getattr(module, attribute) for module, attribute in self.parts]


PACKED_PARAMETERS = Attribute[Callable[[], tuple[Pack, ...]]]("packed_parameters", tuple[Pack, ...])
"""Method of a layer that lists the packs it would like to read.

The layer's `fp8_weights()` may name a pack, even one of a single part.  That promises that only this layer
reads the parts, in FP8, so they may be stored in FP8 although other modules hold them.
"""

PACKED_PARTS = Attribute[tuple[Tensor, ...]]("packed_parts", ())
"""Attribute of an engine's packed tensor: the parts, whose gradients a backward is asked for.  They are the
last inputs, in this order, of the function that computed the tensor."""


Get = Callable[[], Tensor | None]
"""Function that returns a pack's tensor; None while the parts are ordinary, as in `summon_full_params`."""


class _Getters(dict[str, Get]):
    """Functions that return a layer's packed tensors, by name; not copied with the layer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Getters:
        return _Getters()

    def __reduce__(self) -> tuple[type[_Getters], tuple[()]]:
        return _Getters, ()


_GETTERS = "_flatfsdp_packed"


def leave_packed(layer: nn.Module, name: str, get: Get) -> None:
    """Gives `layer` its pack `name`: `packed_tensor` returns the result of `get` from now on."""
    vars(layer).setdefault(_GETTERS, _Getters())[name] = get


def is_packed(layer: nn.Module, name: str) -> bool:
    """Whether an engine has put the parts of this pack side by side."""
    return name in vars(layer).get(_GETTERS, ())


def packed_tensor(layer: nn.Module, pack: Pack) -> Tensor | None:
    """Returns the parts one below the other: [sum of rows, columns], or [sum of elements] for biases.

    Returns:
        The engine's tensor, or a concatenation if no engine has the parts.  None if an engine has them, but
        not side by side: they are in several units, partly frozen, or of several dtypes.
    """
    get: Get | None = vars(layer).get(_GETTERS, {}).get(pack.name)
    tensor = None if get is None else get()
    if tensor is not None:
        return tensor
    if len(pack.parts) == 1:
        return pack.tensors()[0]
    if any(_is_engines(module, attribute) for module, attribute in pack.parts):
        return None
    return torch.cat(pack.tensors())


def _is_engines(module: nn.Module, attribute: str) -> bool:
    """Whether an engine has replaced a parameter, and its replacement is in place now."""
    return attribute in taken_from(module) and attribute in vars(module)


class Wanted(Enum):
    """The parts of a weight whose gradients the running backward asks for."""

    ALL = "all"
    SOME = "some"
    NONE = "none"


def wanted_grads(weight: Tensor, node: Node) -> Wanted:
    """Tells which gradients of `weight` the running backward asks for; a pack may need those of some parts.

    `autograd.grad` and `backward(inputs=...)` may ask for some parts; parts may be frozen after the forward.

    Args:
        weight: a parameter, or a pack.
        node: the running autograd node, one of whose inputs is `weight`.
    """
    parts = PACKED_PARTS.of(weight)
    if not parts:
        return Wanted.ALL if receives_gradient(weight, node_after(node, weight)) else Wanted.NONE
    nodes = nodes_behind(weight, len(parts))
    wanted = [receives_gradient(part, node) for part, node in zip(parts, nodes, strict=True)]
    if all(wanted):
        return Wanted.ALL
    return Wanted.SOME if any(wanted) else Wanted.NONE
