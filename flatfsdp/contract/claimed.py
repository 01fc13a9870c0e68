"""Which modules are units, and which parameters they have taken, so that others can tell.

Left on units, on the parameters that a module had before it was sharded, and on the modules that had them.
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
"""The name that a parameter from before has in the unit that has taken it."""

_TAKEN_FROM = Attribute[dict[str, str]]("_flatfsdp_names", {})
"""The same, by the attributes of the module that had them."""


def taken_from(module: nn.Module) -> dict[str, str]:
    """Names in the unit that has taken them, by attribute of `module`; not those of a module inside it."""
    return vars(module).get(_TAKEN_FROM.name, {})


def mark_taken_from(module: nn.Module, attribute: str, name: str) -> None:
    """Notes that a unit has taken `module.<attribute>` under this name."""
    vars(module).setdefault(_TAKEN_FROM.name, {})[attribute] = name
