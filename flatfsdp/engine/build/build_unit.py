"""Builds a unit: claims what it owns of a module, and puts the parameters into flat groups.

In:   a module, in which inner units have taken their parts already, and options.
Out:  the unit, with the parameters that are left: checked, and one flat group for each kind of them.
Next: `engine/storage/group.py` is a flat group; `engine/api/shard.py` gives the module its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatfsdp.comm.agreement import make_same_on_all_ranks
from flatfsdp.comm.device import indexed
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.claimed import TAKEN_AS, mark_taken_from, taken_from
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.contract.late_buffers import LATE_BUFFERS
from flatfsdp.contract.partners import adapt
from flatfsdp.contract.placement import Placement, check_marks, check_placement, placement_of
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.guards.modules import guard
from flatfsdp.engine.guards.other_engines import refuse_others_inside
from flatfsdp.engine.step.driven_unit import DrivenUnit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.optimizer_targets import attach_targets
from flatfsdp.engine.storage.state import Shared
from flatfsdp.engine.whole.state_dicts import follow_state_dicts
from flatfsdp.engine.whole.units import UnitModule, units_in
from flatfsdp.flat.binding import Binding, require_plain
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT, Role
from flatfsdp.flat.meta_device import is_on_meta, materialize
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.flat.pack_candidates import Packs
from flatfsdp.fp8.step_scales import StepScales
from flatfsdp.microbatch import Microbatch
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
    policy = Policy.of(options)
    grid = Grid.of(options.get("mesh"), options.get("tp_group"))
    if policy.lanes is not None:
        policy.lanes.require_fit(grid)
        _require_no_running_statistics(module)
    for name, parameter in parameters.items():
        check_placement(name, parameter, grid.tensor)
    for path, owner in own_modules(module):
        check_marks(path, owner)
    device = device_of(options.get("device"), module, parameters, grid)
    # Also those on the meta device, which are replaced: another unit may still hold one that was tied.
    taken = list(parameters.items())
    if any(is_on_meta(owner) for _, owner in own_modules(module)):
        materialize(own_modules(module), device, options.get("param_init_fn"))
        parameters = parameters_to_take(module)
        taken += parameters.items()
    owned = list(own_modules(module))
    if takes_first:
        buffers = {f"{path}.{name}": each for path, owner in owned for name, each in buffers_of(owner)}
        # Among the ranks of a replica first, and then from the first replica to the others.
        make_same_on_all_ranks({**parameters, **buffers}, (grid.shard, grid.replicate), device)
    contains_units = any(isinstance(each, UnitModule) for each in module.modules())
    modules = [owner for _, owner in owned]
    prepared: dict[Tensor, Tensor] = {}
    for owner in modules:
        for name, buffer in buffers_of(owner):
            # Once for each, so that tied buffers stay tied.
            if buffer not in prepared:
                # Scales of FP8 layers are FP32 whatever the model is cast to.
                is_cast = buffer.is_floating_point() and name not in LATE_BUFFERS.of(owner)
                prepared[buffer] = buffer.to(device, policy.precision.buffer if is_cast else None)
            owner._buffers[name] = prepared[buffer]
    bindings = bindings_of(module, parameters.values(), grid.tensor, policy)
    microbatch = Microbatch(None if policy.lanes is None else policy.lanes.turns(grid))
    shared = Shared(device, microbatch, scales=StepScales(None if policy.lanes is None else grid.num_ranks))
    unit = DrivenUnit(policy, grid, shared, modules, contains_units=contains_units)
    for binding in bindings:
        group = FlatGroup(unit, binding, lists_flat=lists_flat)
        unit.groups.append(group)
        attach_targets(group)
    for owner in modules:
        adapt(owner, unit)
    # So that another unit that shares a parameter can tell.
    for site in (site for binding in bindings for sites in binding.sites for site in sites):
        mark_taken_from(site.module, site.attribute, site.name)
    for name, parameter in taken:
        TAKEN_AS.leave(parameter, name)
    follow_state_dicts(unit)
    guard(modules)
    return unit


def own_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields `module` and the modules below it that belong to no inner unit, each with its path."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(unwrapped(child), UnitModule):
            yield from own_modules(child, f"{path}.{name}".lstrip("."))


def parameters_to_take(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters below `module` that no unit owns, by name; validated before anything changes."""
    found: dict[nn.Parameter, str] = {}
    for path, owner in own_modules(module):
        refuse_others_inside(path, owner)
        if isinstance(owner, ModuleWrapper | UnitModule):
            raise ValueError(
                f"{path or 'the module'} is a {type(owner).__name__}, which keeps its parameters "
                "already; shard or wrap the plain module"
            )
        for attribute, name in taken_from(owner).items():
            listed = owner._parameters.get(attribute)
            # Otherwise another parameter was registered here since then, which no unit has.
            if listed is None or FLAT_SHARD.of(listed) is not None:
                raise ValueError(_tied_message(f"{path}.{attribute}", name))
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, f"{path}.{attribute}".lstrip("."))
    for parameter, name in found.items():
        owner_name = TAKEN_AS.of(parameter)
        if owner_name is not None:
            raise ValueError(_tied_message(name, owner_name))
        require_plain(name, parameter)
    return {name: parameter for parameter, name in found.items()}


def _require_no_running_statistics(module: nn.Module) -> None:
    """Checks that nothing depends on which microbatches a rank runs, for a model with lanes.

    Raises:
        ValueError: for BatchNorm with running statistics, or over several ranks.
    """
    for path, owner in own_modules(module):
        counts = isinstance(owner, _BatchNorm) and (owner.track_running_stats and owner.training)
        if counts or isinstance(owner, nn.SyncBatchNorm):
            raise ValueError(
                f"{path} is a {type(owner).__name__}, whose statistics are of one rank's microbatches or of "
                "one turn: with lanes they would depend on the number of ranks; call eval() on it first, or "
                "take GroupNorm or LayerNorm"
            )


def _tied_message(name: str, other: str) -> str:
    return (
        f"parameter {name} is tied to {other}, which another FlatFSDP unit has taken; wrap a module that "
        "contains both, so that they live in one unit"
    )


def bindings_of(
    module: nn.Module, parameters: Iterable[nn.Parameter], tensor: Ranks, policy: Policy
) -> list[Binding]:
    """Groups parameters that are treated alike, one `Binding` a group.

    Groups differ in training (trained or frozen), storage (FP8 or not) and placement (split over
    tensor-parallel ranks, or whole on each of them).  Parameters that are one GEMM operand are neighbours.
    """
    parameters = list(parameters)
    packs = Packs(own_modules(module), parameters, tensor, ELEMENT_ALIGNMENT)
    in_fp8 = packs.stored_in_fp8(module) if policy.precision.fp8_weights is not None else ()
    kinds = {}
    for parameter in packs.in_order(parameters):
        role = Role.FP8 if parameter in in_fp8 else Role.COMPUTE
        kinds[parameter] = parameter.requires_grad, role, placement_of(parameter, tensor)
    places = {parameter: place for place, parameter in enumerate(parameters)}
    bindings = []
    # In one order on all ranks, and with a group for each kind of which there are parameters.
    for kind in itertools.product((True, False), Role, Placement):
        members = [parameter for parameter in kinds if kinds[parameter] == kind]
        if members:
            # The same padding on any number of ranks, so that every rank's lanes have the same places.
            cuts = 1 if policy.lanes is None else policy.lanes.number
            binding = Binding.of(module, members, kind[1], tensor, packs.among(members), cuts)
            before = [places[parameter] for parameter in members]
            # Its shards are in another order than the modules, which the flat parameter's name tells.
            binding.is_moved = before != sorted(before)
            bindings.append(binding)
    return bindings


def device_of(
    device: torch.device | str | None, module: nn.Module, parameters: dict[str, nn.Parameter], grid: Grid
) -> torch.device:
    """Returns `device` with its index; by default the device of the module's inner units and parameters.

    Raises:
        ValueError: if they are on several devices, or on the meta device; if the ranks' backend cannot reach
            the device.
    """
    if device is None:
        found = {m.fsdp_state.shared.device: f"unit {prefix.rstrip('.')}" for prefix, m in units_in(module)}
        found |= {p.device: f"parameter {name}" for name, p in parameters.items() if not p.is_meta}
        meta = next((name for name, p in parameters.items() if p.is_meta), None)
        if meta is not None and not found:
            raise ValueError(f"parameter {meta} is on the meta device; pass device= to say where it shall be")
        if len(found) > 1:
            places = ", ".join(f"{what} is on {where}" for where, what in found.items())
            raise ValueError(f"{places}; pass device= to say where the whole module shall be")
        device = next(iter(found), torch.device("cpu"))
    device = indexed(torch.device(device))
    grid.require_reach(device)
    return device


def buffers_of(owner: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that a module has directly, by name."""
    return [(name, buffer) for name, buffer in owner._buffers.items() if buffer is not None]
