"""Guards the modules of a unit: hooks of PyTorch through which the engine sees what happens to them.

In:   the modules that have become a unit.
Out:  `guard(modules)`; from then on the files of this folder check each such event, and raise in the
      offending call.  Here: parameters added below the unit (a LoRA layer, a converted one, a resized
      embedding), which nothing would shard, gather or reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatfsdp.contract.claimed import is_owned, is_unit, mark_owned, taken_from
from flatfsdp.contract.flat_shard import FLAT_SHARD
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


def refuse_late_module(parent: nn.Module, name: str, value: nn.Module | None) -> None:
    """Checks an assignment before `parent.name` becomes `value`.

    Allowed are a module without parameters, a frozen one (a teacher), and one that wraps the old module.

    Raises:
        TypeError: if `parent` belongs to a unit, and `value` brings parameters that the unit has not sharded,
            or drops some that it has.
    """
    present = parent._modules.get(name)
    if value is present or not is_owned(parent):
        return
    brought = nn.Module.named_parameters(value) if value is not None else ()
    trained = (name for name, each in brought if each.requires_grad and FLAT_SHARD.of(each) is None)
    if (parameter := next(trained, None)) is not None:
        raise TypeError(
            f"{name} of {type(parent).__name__} brings parameter {parameter} into a unit that is built "
            f"already: it would be neither sharded nor reduced. {_WAY_OUT}"
        )
    if present is not None and (lost := next(_sharded(present, value), None)) is not None:
        raise TypeError(
            f"{name} of {type(parent).__name__} is replaced in a unit that is built already, which has "
            f"sharded {lost} there and would keep it without a use. {_WAY_OUT}"
        )


_WAY_OUT = (
    "Change the model first (LoRA, convert, resize_token_embeddings, another head), then shard it, then make "
    "the optimizer; values are replaced by load_state_dict(), or inside summon_full_params()"
)


def _sharded(module: nn.Module, kept: nn.Module | None) -> Iterator[str]:
    """Names of the parameters that units have sharded in `module`, but not inside `kept`."""
    # A module that wraps the old one, such as a layer of LoRA, keeps its parameters in use.
    stays = set() if kept is None else set(kept.modules())
    for path, each in module.named_modules():
        if each not in stays:
            names = [*taken_from(each), *(each._parameters if is_unit(each) else ())]
            yield from (f"{path}.{name}".lstrip(".") for name in names)
