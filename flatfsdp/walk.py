"""Walks over a model: its units, their flat groups, the state-dict keys of their parameters.

In:   a module that is, or contains, FlatFSDP modules.
Out:  those, each with the prefix that the names of its parameters have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from flatfsdp.flat_group import FlatGroup
from flatfsdp.layout import ParamSlot
from flatfsdp.sites import prefixed_modules
from flatfsdp.unit_module import UnitModule

Model = nn.Module | Sequence[nn.Module]
"""A model, or the stages of one that this rank has, in which layers have the names of the whole model."""


def units_in(module: nn.Module) -> Iterator[tuple[str, UnitModule]]:
    """Every FlatFSDP in `module`, itself included, in registration order.

    Each with the prefix of its parameters' original names: "" for `module` itself, else such as "blocks.0.".
    One that has two paths comes up twice.
    """
    for prefix, each in prefixed_modules(module):
        if isinstance(each, UnitModule):
            yield prefix, each


def parts_of(model: Model) -> list[nn.Module]:
    """The stages, or the one model."""
    return [model] if isinstance(model, nn.Module) else list(model)


def named_groups(model: Model) -> list[tuple[str, FlatGroup]]:
    """Every flat group in `model` once, in registration order, with the prefix of its names.

    Collective the first time, if `model` has not been used yet.

    Raises:
        ValueError: if there is no FlatFSDP module.
    """
    units: dict[UnitModule, str] = {}
    for part in parts_of(model):
        found = list(units_in(part))
        if not found:
            raise ValueError(f"{type(part).__name__} contains no FlatFSDP module; wrap it first")
        for prefix, wrapped in found:
            units.setdefault(wrapped, prefix)
    for wrapped in units:
        wrapped._init_root()
    return [(prefix, group) for wrapped, prefix in units.items() for group in wrapped._unit.groups]


def keys_of_slots(model: nn.Module) -> dict[tuple[FlatGroup, ParamSlot], list[str]]:
    """Every state-dict key of every parameter: several for tied ones and for modules with several paths."""
    keys: dict[tuple[FlatGroup, ParamSlot], list[str]] = {}
    for prefix, wrapped in units_in(model):
        for group in wrapped._unit.groups:
            for slot, sites in zip(group.layout.slots, group.binding.sites, strict=True):
                keys.setdefault((group, slot), []).extend(prefix + site.name for site in sites)
    return keys
