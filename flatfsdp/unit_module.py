"""`UnitModule`: a wrapped module that is a unit, and the state that it has of one.

In:   a module, and where, over which ranks and how its parameters are to be kept.
Out:  what `walk.py` finds in a model.
Next: `fsdp.py` takes the parameters and runs the module.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from flatfsdp.comm import Grid
from flatfsdp.microbatch import Microbatch
from flatfsdp.observe import ByteLedger
from flatfsdp.policy import Policy
from flatfsdp.root import Root
from flatfsdp.unit import Unit
from flatfsdp.wrapper import ModuleWrapper


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
