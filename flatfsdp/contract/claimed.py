"""Marks of modules that are units, and of what they own, for other units, engines and old optimizers.

Left on units, on the parameters that a module had before it was sharded, and on what it shows in their place;
on the modules that had them; and on all modules whose parameters, now or later, are the unit's to keep.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from flatfsdp.contract.attribute import Attribute

FSDP_STATE = Attribute[Any]("fsdp_state", None)
"""What the engine knows of a sharded module (`engine/units.py`); None for any other module."""

PART_OF = Attribute[Any]("_flatfsdp_part_of", None)
"""A weak reference to the unit around a module that may be called by itself; see `engine/in_place`."""

TAKEN_AS = Attribute[str | None]("_flatfsdp_name", None)
"""The name in its unit of a tensor that an optimizer cannot update: the shard has the values."""

_TAKEN_FROM = Attribute[dict[str, str]]("_flatfsdp_names", {})
"""The same, by the attributes of the module that had them."""


def taken_from(module: nn.Module) -> dict[str, str]:
    """Names in the unit that has taken them, by attribute of `module`; not those of a module inside it."""
    return vars(module).get(_TAKEN_FROM.name, {})


def mark_taken_from(module: nn.Module, attribute: str, name: str) -> None:
    """Notes that a unit has taken `module.<attribute>` under this name."""
    vars(module).setdefault(_TAKEN_FROM.name, {})[attribute] = name


_OWNED = "_flatfsdp_owned"


def mark_owned(module: nn.Module) -> None:
    """Notes that `module` belongs to a unit, with all parameters that it has."""
    # By its address: a copy of the module, pickled or not, belongs to nobody.
    vars(module)[_OWNED] = id(module)


def is_owned(module: nn.Module) -> bool:
    """Whether `module` belongs to a unit; a wrapper does not, which may be given other modules."""
    return vars(module).get(_OWNED) == id(module)


def is_unit(module: nn.Module) -> bool:
    """Whether the engine keeps the parameters of `module` in flat shards."""
    return FSDP_STATE.name in vars(module)
