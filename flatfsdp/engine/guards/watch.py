"""Hooks of PyTorch through which the engine sees what happens to its units and shards.

In:   a module that has become a unit.
Out:  `guard(modules)`; from then on the other files of this folder check each such event.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatfsdp.contract.claimed import mark_owned
from flatfsdp.engine.guards.late_modules import refuse_late_module
from flatfsdp.engine.guards.optimizers import before_step, watching
from flatfsdp.engine.guards.other_engines import refuse_distribution, refuse_engine_around


def guard(modules: Iterable[nn.Module]) -> None:
    """Raises from now on where a change would break these modules, whose parameters a unit has taken."""
    for owned in modules:
        mark_owned(owned)
        refuse_distribution(owned)
    _install()


@functools.cache
def _install() -> None:
    """Installs hooks that stay until the process ends.

    They hold no model: marks on a module or parameter say whether a unit owns it.
    """
    register_module_module_registration_hook(refuse_late_module)
    register_module_module_registration_hook(refuse_engine_around)
    register_optimizer_step_pre_hook(before_step)
    # PyTorch has no hook for what optimizers are given, nor for state dicts of all of them.
    cls: Any = torch.optim.Optimizer
    cls.add_param_group = watching(cls.add_param_group)
