"""Builds a unit: puts a module's parameters into flat groups, for the wrapper and for in-place sharding.

In:   a module, in which inner units have taken their parts already; ranks and policy.
Out:  the unit.
Next: `engine/api/wrapper.py` registers flat parameters with the wrapper; `engine/api/shard.py` gives the
      module its class.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.grid import Grid
from flatfsdp.contract.partners import adapt
from flatfsdp.contract.placement import check_marks, check_placement
from flatfsdp.engine.build.claim import (
    bindings_of,
    default_precision,
    device_of,
    mark_taken,
    own_modules,
    parameters_to_take,
    prepare_buffers,
)
from flatfsdp.engine.guards.watch import guard
from flatfsdp.engine.step.driven_unit import DrivenUnit
from flatfsdp.engine.storage.first_values import take_from_first_rank
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.shared import Shared
from flatfsdp.engine.storage.targets import attach_targets
from flatfsdp.engine.storage.views import cut
from flatfsdp.engine.whole.state_dicts import follow_state_dicts
from flatfsdp.engine.whole.units import UnitModule
from flatfsdp.flat.meta_device import ParamInit, is_on_meta, materialize
from flatfsdp.policy import Policy, Precision, require_flag


def build_unit(
    module: nn.Module,
    *,
    in_place: bool,
    mesh: DeviceMesh | None = None,
    tp_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    param_init_fn: ParamInit | None = None,
    sync_module_states: bool = False,
    precision: Precision | None = None,
    **settings: Any,
) -> DrivenUnit:
    """Shards the parameters below `module` that no unit has taken.

    Args:
        module: module to shard.
        in_place: whether the modules list this rank's part of each parameter under its own name.
        mesh, tp_group, device, param_init_fn, sync_module_states, precision: as in `Options`.
        settings: other fields of `Policy`.

    Raises:
        TypeError, ValueError: for the same reasons as `FlatFSDP`.
    """
    require_flag("sync_module_states", sync_module_states)
    # PyTorch's state-dict functions would take shards for whole tensors.  By name: the engine does not depend
    # on what is built on it.
    import_module("flatfsdp.compat.torch_state_dicts.functions").install()
    parameters = parameters_to_take(module)
    policy = Policy(precision=default_precision(parameters) if precision is None else precision, **settings)
    grid = Grid.of(mesh, tp_group)
    for name, parameter in parameters.items():
        check_placement(name, parameter, grid.tensor)
    for path, owner in own_modules(module):
        check_marks(path, owner)
    place = device_of(device, module, parameters, grid)
    taken = list(parameters.items())
    if any(is_on_meta(owner) for _, owner in own_modules(module)):
        materialize(own_modules(module), place, param_init_fn)
        parameters = parameters_to_take(module)
        taken += parameters.items()
    if sync_module_states:
        buffers = {
            f"{path}.{name}": buffer
            for path, owner in own_modules(module)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }
        take_from_first_rank({**parameters, **buffers}, grid, place)
    contains_units = any(isinstance(each, UnitModule) for each in module.modules())
    modules = [each for _, each in own_modules(module)]
    prepare_buffers(module, place, policy.precision.buffer)
    in_fp8 = policy.precision.fp8_weights is not None
    bindings = bindings_of(module, parameters.values(), grid.tensor, fp8=in_fp8)
    unit = DrivenUnit(policy, grid, Shared(place), modules, contains_units=contains_units)
    for binding in bindings:
        group = FlatGroup(unit, binding, unit.landed, cut=cut if in_place else None)
        unit.add(group)
        attach_targets(group)
    for owner in modules:
        adapt(owner, unit)
    mark_taken(bindings, taken)
    if in_place:
        follow_state_dicts(unit)
    guard(modules)
    return unit
