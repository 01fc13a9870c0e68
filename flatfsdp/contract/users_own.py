"""What users, and other libraries, have set on a parameter: it holds for the parameter in its place, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatfsdp.contract import claimed, flat_shard, main_grad, operand, whole_shape
from flatfsdp.contract.attribute import Attribute

_OF_ONE_TENSOR = {
    each.name
    for contract in (claimed, flat_shard, main_grad, operand, whole_shape)
    for each in vars(contract).values()
    if isinstance(each, Attribute)
}
"""Attributes that the engine and layers set on one tensor, and that do not hold for its replacement."""


def users_own(parameter: Tensor) -> dict[str, Any]:
    """The attributes of a parameter without those of one tensor."""
    return {name: each for name, each in vars(parameter).items() if name not in _OF_ONE_TENSOR}
