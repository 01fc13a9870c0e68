"""Which parameters a unit has taken, so that another unit, or an optimizer from before, can tell.

Left on the parameters that a module had before it was wrapped, and on the modules that had them.
"""

from __future__ import annotations

from torch import nn

from flatfsdp.contract.attribute import Attribute

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
