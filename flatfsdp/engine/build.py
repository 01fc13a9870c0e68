"""Builds a unit: puts a module's parameters into flat groups, for the wrapper and for in-place sharding.

In:   a module, in which inner units have taken their parts already; ranks and policy.
Out:  its `UnitState`.
Next: `fsdp.py` registers flat parameters with the wrapper; `in_place/shard.py` gives the module its class.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.byte_ledger import ByteLedger
from flatfsdp.comm.checking.identity import RANK_TIMEOUT
from flatfsdp.comm.grid import Grid
from flatfsdp.contract.placement import check_marks, check_placement
from flatfsdp.engine.claim import (
    bindings_of,
    default_precision,
    device_of,
    mark_taken,
    own_modules,
    parameters_to_take,
    prepare_buffers,
)
from flatfsdp.engine.first_rank import take_from_first_rank
from flatfsdp.engine.guards.watch import guard
from flatfsdp.engine.in_place.views import cut
from flatfsdp.engine.param_groups import attach_targets
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.transformer_engine import free_fp8_weights
from flatfsdp.engine.units import UnitModule, UnitState
from flatfsdp.flat.meta_device import ParamInit, is_on_meta, materialize
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import GradSync, Policy, Precision, Prefetch, require_flag


def build_unit(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    *,
    in_place: bool,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    cast_inputs: bool = True,
    shard: bool = True,
    reshard_after_forward: bool = True,
    optimize_backward_concat: bool = False,
    grad_sync: GradSync = "last",
    prefetch: Prefetch | None = None,
    cpu_offload: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    param_init_fn: ParamInit | None = None,
    sync_module_states: bool = False,
    check_collectives: bool = True,
    rank_timeout: float = RANK_TIMEOUT,
    poison_on_free: bool = False,
) -> UnitState:
    """Shards the parameters below `module` that no unit has taken.

    Args:
        in_place: whether the modules list this rank's part of each parameter under its own name.
        others: the arguments of `FlatFSDP`, with the same meaning and defaults.

    Raises:
        TypeError, ValueError: for the same reasons as `FlatFSDP`.
    """
    require_flag("shard", shard)
    parameters = parameters_to_take(module)
    policy = Policy(
        default_precision(parameters) if precision is None else precision,
        cast_inputs,
        reshard_after_forward,
        optimize_backward_concat,
        grad_sync,
        Prefetch() if prefetch is None else prefetch,
        cpu_offload,
        check_collectives,
        poison_on_free,
        rank_timeout,
    )
    grid = Grid.of(process_group, mesh, shard, tp_group)
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
    unit = Unit(modules, reshard_after_forward, contains_units=contains_units)
    state = UnitState(policy, grid, place, unit, Microbatch(), ByteLedger())
    prepare_buffers(module, place, policy.precision.buffer)
    in_fp8 = policy.precision.fp8_weights is not None
    bindings = bindings_of(module, parameters.values(), grid.tensor, fp8=in_fp8)
    for binding in bindings:
        group = FlatGroup(
            binding,
            grid,
            place,
            policy,
            state.microbatch,
            state.ledger,
            unit.landed,
            cut=cut if in_place else None,
        )
        unit.add(group)
        attach_targets(group)
    for _, owner in own_modules(module):
        free_fp8_weights(owner, unit)
    mark_taken(bindings, taken)
    guard(module)
    return state
