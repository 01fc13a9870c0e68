"""Marks of modules that are units, and of what they own, for other units, engines and old optimizers.

Units are marked; so are the parameters that a module had before it was sharded, the tensors shown in their
place, the modules that had them, and all modules whose parameters, now or later, belong to the unit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.transparent import unwrapped

FSDP_STATE = Attribute[Any]("fsdp_state", None)
"""Engine state of a sharded module (`engine/whole/units.py`); None for any other module."""

PART_OF = Attribute[Any]("_flatfsdp_part_of", None)
"""Weak reference to the unit around a module that may be called by itself; see `engine/api`."""

TAKEN_AS = Attribute[str | None]("_flatfsdp_name", None)
"""Name in its unit of a tensor that an optimizer must not update, because the shard has the values."""

_TAKEN_FROM = Attribute[dict[str, str]]("_flatfsdp_names", {})
"""The same names on the module that had the parameters, by attribute."""


def taken_from(module: nn.Module) -> dict[str, str]:
    """Names of taken parameters in their unit, by attribute of `module`; without those of inner modules."""
    return vars(module).get(_TAKEN_FROM.name, {})


def mark_taken_from(module: nn.Module, attribute: str, name: str) -> None:
    """Notes that a unit has taken `module.<attribute>` under this name."""
    vars(module).setdefault(_TAKEN_FROM.name, {})[attribute] = name


_OWNED = "_flatfsdp_owned"


def mark_owned(module: nn.Module) -> None:
    """Marks `module`, and all parameters that it has or gets, as a unit's."""
    # By address, so that a copy of the module, pickled or not, belongs to no unit.
    vars(module)[_OWNED] = id(module)


def is_owned(module: nn.Module) -> bool:
    """Whether `module` belongs to a unit; a wrapper does not, as it may be given other modules."""
    return vars(module).get(_OWNED) == id(module)


def is_unit(module: nn.Module) -> bool:
    """Whether the engine keeps the parameters of `module`, or of the module that it wraps, in flat shards."""
    return FSDP_STATE.name in vars(unwrapped(module))
