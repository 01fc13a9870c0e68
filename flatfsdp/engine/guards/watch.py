"""Hooks of PyTorch through which the engine sees what is done to its units, and with its shards.

In:   a module that has become a unit.
Out:  `guard(module)`; from then on the other files of this folder are asked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatfsdp.contract.claimed import mark_owned
from flatfsdp.engine.claim import own_modules
from flatfsdp.engine.guards.late_modules import refuse_late_module
from flatfsdp.engine.guards.optimizers import refuse_optimizer
from flatfsdp.engine.guards.other_engines import refuse_engine_around
from flatfsdp.torch_private import never_traced


def guard(module: nn.Module) -> None:
    """From now on what would go wrong with `module`, whose parameters a unit has taken, raises."""
    for _, owned in own_modules(module):
        mark_owned(owned)
    _install()


@cache
def _install() -> None:
    """Hooks that stay until the process ends.

    They know no model: whether a module is a unit's, or a parameter a shard, is written on it.
    """
    register_module_module_registration_hook(_before_module)
    register_optimizer_step_pre_hook(_before_step)


def _before_module(parent: nn.Module, name: str, value: nn.Module | None) -> None:
    refuse_late_module(parent, name, value)
    if value is not None:
        refuse_engine_around(parent, value)


# Also called in compiled steps of any optimizer, whose parameters the compiler cannot look at like this.
@never_traced
def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    refuse_optimizer(optimizer)
