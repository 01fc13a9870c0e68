"""Hooks of PyTorch through which the engine sees what happens to its units and shards.

In:   a module that has become a unit.
Out:  `guard(module)`; from then on the other files of this folder check each such event.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatfsdp.contract.claimed import mark_owned
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.engine.claim import own_modules
from flatfsdp.engine.guards.late_modules import refuse_late_module
from flatfsdp.engine.guards.optimizers import (
    note_part,
    parameters_of,
    refuse_early_step,
    refuse_optimizer,
    refuse_state_of_another_part,
    refuse_whole_parameters_needed,
)
from flatfsdp.engine.guards.other_engines import refuse_engine_around
from flatfsdp.torch_private import never_traced


def guard(module: nn.Module) -> None:
    """Raises from now on where a change would break `module`, whose parameters a unit has taken."""
    for _, owned in own_modules(module):
        mark_owned(owned)
    _install()


@functools.cache
def _install() -> None:
    """Installs hooks that stay until the process ends.

    They hold no model: marks on a module or parameter say whether a unit owns it.
    """
    register_module_module_registration_hook(refuse_late_module)
    register_module_module_registration_hook(refuse_engine_around)
    register_optimizer_step_pre_hook(_before_step)
    # PyTorch has no hook for what optimizers are given, nor for state dicts of all of them.
    cls: Any = torch.optim.Optimizer
    cls.add_param_group = _watching(cls.add_param_group)


def _watching(add: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add)
    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(optimizer, param_group)
        try:
            watch(optimizer)
        except ValueError:
            optimizer.param_groups.pop()
            raise

    return add_param_group


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Watches the state dicts of an optimizer that has shards, however it came by them.

    Raises:
        ValueError: if it needs whole parameters.
    """
    watched = vars(optimizer)
    # No function call per parameter: an ordinary optimizer, which is never watched, comes here in each step.
    shard = FLAT_SHARD.name
    if _WATCHED in watched or all(p.__dict__.get(shard) is None for p in parameters_of(optimizer)):
        return
    refuse_whole_parameters_needed(optimizer)
    optimizer.register_state_dict_post_hook(note_part)
    optimizer.register_load_state_dict_pre_hook(refuse_state_of_another_part)
    watched[_WATCHED] = True


_WATCHED = "_flatfsdp_watched"
"""Attribute of optimizers whose state dicts are watched."""


# Compiled optimizer steps call it, too, and the compiler cannot trace such a look at parameters.
@never_traced
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    refuse_optimizer(optimizer)
    watch(optimizer)
    # A closure runs the backward, later; the optimizer itself is the first argument.
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        refuse_early_step(optimizer)
