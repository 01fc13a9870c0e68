"""Builds a unit: puts a module's parameters into flat groups.

In:   a module, in which inner units have taken their parts already, and options.
Out:  the unit.
Next: `engine/api/shard.py` gives the module its class.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

from torch import nn

from flatfsdp.comm.grid import Grid
from flatfsdp.contract.partners import adapt
from flatfsdp.contract.placement import check_marks, check_placement
from flatfsdp.engine.build.claim import (
    bindings_of,
    buffers_of,
    device_of,
    mark_taken,
    own_modules,
    parameters_to_take,
    prepare_buffers,
)
from flatfsdp.engine.guards.modules import guard
from flatfsdp.engine.step.driven_unit import DrivenUnit
from flatfsdp.engine.storage.first_values import take_from_first_rank
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.optimizer_targets import attach_targets
from flatfsdp.engine.storage.shared import Shared
from flatfsdp.engine.whole.state_dicts import follow_state_dicts
from flatfsdp.engine.whole.units import UnitModule
from flatfsdp.flat.meta_device import is_on_meta, materialize
from flatfsdp.options import Options, Policy, require_flag


def build_unit(module: nn.Module, options: Options, *, lists_flat: bool = False) -> DrivenUnit:
    """Shards the parameters below `module` that no unit has taken.

    Args:
        module: module to shard.
        options: what the user has chosen, and a precision in any case.
        lists_flat: whether modules list no parameter, for a wrapper that lists flat ones.

    Raises:
        TypeError, ValueError: for the same reasons as `shard`.
    """
    takes_first = options.get("sync_module_states", False)
    require_flag("sync_module_states", takes_first)
    # PyTorch's state-dict functions would take shards for whole tensors.  By name: the engine does not depend
    # on what is built on it.
    import_module("flatfsdp.compat.torch_state_dicts.functions").install()
    parameters = parameters_to_take(module)
    chosen: dict[str, Any] = dict(options)
    policy = Policy(**{each.name: chosen[each.name] for each in fields(Policy) if each.name in chosen})
    grid = Grid.of(options.get("mesh"), options.get("tp_group"))
    for name, parameter in parameters.items():
        check_placement(name, parameter, grid.tensor)
    for path, owner in own_modules(module):
        check_marks(path, owner)
    device = device_of(options.get("device"), module, parameters, grid)
    taken = list(parameters.items())
    if any(is_on_meta(owner) for _, owner in own_modules(module)):
        materialize(own_modules(module), device, options.get("param_init_fn"))
        parameters = parameters_to_take(module)
        taken += parameters.items()
    owned = list(own_modules(module))
    if takes_first:
        buffers = {f"{path}.{name}": each for path, owner in owned for name, each in buffers_of(owner)}
        take_from_first_rank({**parameters, **buffers}, grid, device)
    contains_units = any(isinstance(each, UnitModule) for each in module.modules())
    modules = [owner for _, owner in owned]
    prepare_buffers(modules, device, policy.precision.buffer)
    in_fp8 = policy.precision.fp8_weights is not None
    bindings = bindings_of(module, parameters.values(), grid.tensor, fp8=in_fp8)
    unit = DrivenUnit(policy, grid, Shared(device), modules, contains_units=contains_units)
    for binding in bindings:
        group = FlatGroup(unit, binding, lists_flat=lists_flat)
        unit.add(group)
        attach_targets(group)
    for owner in modules:
        adapt(owner, unit)
    mark_taken(bindings, taken)
    follow_state_dicts(unit)
    guard(modules)
    return unit
