"""Finds the unit around a module that may be called by itself, outside of the unit's forward."""

from __future__ import annotations

from torch import nn

from flatfsdp.contract.claimed import PART_OF
from flatfsdp.engine.methods import UnitMethods


def unit_of(module: nn.Module) -> UnitMethods:
    """Returns the unit of a module: itself if it is one, or the unit that the part belongs to.

    Raises:
        TypeError: for any other module.
    """
    if isinstance(module, UnitMethods):
        return module
    reference = PART_OF.of(module)
    unit = None if reference is None else reference()
    if not isinstance(unit, UnitMethods):
        raise TypeError(
            f"this {type(module).__name__} is neither sharded in place nor a part of a module that is"
        )
    return unit
