"""`UnitModule`: a wrapped module that is a unit; and the units, flat groups and parameter names of a model.

In:   a module, and where, over which ranks and how its parameters are to be kept.
Out:  what finds all units of a model, each with the prefix that the names of its parameters have.
Next: `fsdp.py` takes the parameters and runs the module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatfsdp.comm.grid import Grid
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.flat.sites import prefixed_modules
from flatfsdp.ledger import ByteLedger
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import Policy


class UnitModule(ModuleWrapper):
    """What `FlatFSDP` is to code that walks over a model.

    Attributes:
        microbatch: which microbatch this is; shared with the inner units of a root.
        ledger: bytes moved; shared likewise.
    """

    def __init__(self, module: nn.Module, policy: Policy, grid: Grid, device: torch.device) -> None:
        super().__init__(module)
        self.microbatch = Microbatch()
        self.ledger = ByteLedger()
        # Private, because what is found here hides the wrapped module's attribute of the same name.
        self._policy = policy
        self._grid = grid
        self._device = device
        contains_units = any(isinstance(child, UnitModule) for child in module.modules())
        self._unit = Unit(policy.reshard_after_forward, contains_units=contains_units)
        self._root: Root | None = None
        # Inside summon_full_params; with writeback.
        self._is_whole = self._writes_back = False

    def __setattr__(self, name: str, value: Any) -> None:
        # What the wrapper itself has been given may be replaced; "module" is not there before it is wrapped.
        if (
            isinstance(value, nn.Module)
            and name != "module"
            and name not in self._modules
            and hasattr(self, name)
        ):
            raise TypeError(
                f"{name} cannot be replaced after wrapping: the new module's parameters would be neither "
                "used nor reduced; replace it first, then wrap"
            )
        super().__setattr__(name, value)

    @abstractmethod
    def _init_root(self) -> Root:
        """The root of this unit; the first call makes it, which is collective."""


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
