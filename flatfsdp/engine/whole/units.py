"""`UnitModule`: the root, units, flat groups and parameter names of a model.

In:   a module, in which some are units.
Out:  functions that find all units of a model, each with the prefix of its parameters' names.
Next: `engine/build/build_unit.py` takes the parameters, `engine/api/classes.py` runs the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.guards.other_engines import Guarded
from flatfsdp.engine.step.driven_unit import DrivenUnit
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.whole.grad_sync import chosen_grad_sync
from flatfsdp.flat.layout import ParamSlot, Role


class UnitModule(Guarded):
    """A sharded module, for code that walks over a model.

    Attributes:
        fsdp_state: the module as a unit: its groups, its ranks, and what it shares with the whole model.
    """

    fsdp_state: DrivenUnit


def root_of(module: UnitModule) -> Root:
    """Returns the root of `module`; the first call makes `module` the root of all units inside it.

    Collective the first time: checks that all ranks have built the same model, and makes replicas equal.

    Raises:
        RuntimeError: on all ranks, if the ranks have built different models.
        ValueError: if units inside differ from the root in settings that the whole model must share.
    """
    outermost = module.fsdp_state
    if outermost.is_used:
        return outermost.root
    if outermost.outer is not None and isinstance(outer := outermost.outer(), UnitModule):
        # A layer that is called before the model around it.
        return root_of(outer)
    inside = {unit.fsdp_state: prefix for unit, prefix in distinct_units(module).items()}
    before = {unit: unit.prefix for unit in inside}
    try:
        for unit, prefix in inside.items():
            unit.prefix = prefix
        root = _checked_root(list(inside))
    except BaseException:
        # Not used after all: the next call tries again, and units inside may be models of their own.
        outermost.shared.identity = None
        for unit, prefix in before.items():
            unit.prefix = prefix
        raise
    for unit in inside:
        unit.join(root)
    root.shared.ledger.parameters += sum(slot.numel for group in root.groups for slot in group.layout.slots)
    return root


def _checked_root(units: Sequence[DrivenUnit]) -> Root:
    """Makes the root of these units, the outermost one first; see `root_of`."""
    outermost, groups = units[0], [group for unit in units for group in unit.groups]
    lines = []
    for group in groups:
        described = group.layout.described(group.flags, with_placement=group.grid.tensor.size > 1)
        lines += [f"{group.name}: {line}" for line in (*described, group.unit.policy)]
    shared, policy = outermost.shared, outermost.policy
    grad_sync = chosen_grad_sync(units)
    if policy.grad_sync == "auto":
        lines.append(
            f'grad_sync="auto" has chosen {grad_sync!r}; if GPUs have different memory, choose yourself'
        )
    # Before the communicators below, which ranks with other models would make in other orders, and hang.
    number = check_same_on_all_ranks(lines, outermost.grid.dimensions, shared.device, policy.timeout)
    if any(group.grid.num_ranks > outermost.grid.num_ranks for group in groups):
        # Ranks of other roots, which have agreed on another number, share units inside.
        number = 0
    wants_fp8 = any(unit.policy.precision.fp8_weights is not None for unit in units)
    if wants_fp8 and not any(group.layout.role is Role.FP8 for group in groups):
        raise ValueError(
            "Precision.fp8_weights is set, and no layer has a weight that only FP8 GEMMs read; use those of "
            "flatfsdp.layers, or flatfsdp.layers.convert, or leave fp8_weights out"
        )
    of_root = _settings_of_the_model(outermost)
    for unit in units:
        for what, own in _settings_of_the_model(unit).items():
            if own != (mine := of_root[what]):
                raise ValueError(
                    f"unit {unit.name} needs the {what} of its root: {mine!r}, not {own!r}; "
                    "pass the same to both"
                )
    # Without sharding there is no shard to keep a sum in.
    shared.reduces_every = grad_sync == "every" and any(group.grid.shard.size > 1 for group in groups)
    return Root(units, number)


def _settings_of_the_model(unit: DrivenUnit) -> dict[str, Any]:
    """Settings of a unit that the whole model must share, by name."""
    of_policy = {name: getattr(unit.policy, name) for name in ("grad_sync", "lanes", "prefetch", "timeout")}
    settings = {"device": unit.shared.device, "tp_group": unit.grid.tensor.name, **of_policy}
    if unit.policy.lanes is not None:
        # A turn is one lane of each rank, for all units alike.
        settings["mesh"] = unit.grid.replicate.name, unit.grid.shard.name
    return settings


Model = nn.Module | Sequence[nn.Module]
"""A model, or this rank's stages of one, in which layers have the names of the whole model."""


def units_in(module: nn.Module) -> Iterator[tuple[str, UnitModule]]:
    """Yields every unit in `module`, itself included, in registration order, with its name prefix.

    The prefix is that of its parameters' original names: "" for `module` itself, otherwise such as
    "blocks.0.".  A unit with two paths comes up twice.
    """
    for prefix, each in prefixed_modules(module):
        if isinstance(each, UnitModule):
            yield prefix, each


def distinct_units(module: nn.Module) -> dict[UnitModule, str]:
    """Every unit in `module` once, in registration order, itself included, with its first name prefix."""
    found: dict[UnitModule, str] = {}
    for prefix, unit in units_in(module):
        found.setdefault(unit, prefix)
    return found


def stages_of(model: Model) -> list[nn.Module]:
    """List of the stages, or of the one model."""
    return [model] if isinstance(model, nn.Module) else list(model)


def named_groups(model: Model) -> list[tuple[str, FlatGroup]]:
    """Every flat group in `model` once, in registration order, with the prefix of its names.

    Collective the first time, if `model` has not been used yet.

    Raises:
        ValueError: if there is no unit.
    """
    units: dict[UnitModule, str] = {}
    for stage in stages_of(model):
        if not (found := distinct_units(stage)):
            raise ValueError(f"{type(stage).__name__} contains no unit of FlatFSDP; shard or wrap it first")
        # A unit of two stages has its first name.
        units |= {unit: prefix for unit, prefix in found.items() if unit not in units}
    for unit in units:
        root_of(unit)
    return [(prefix, group) for unit, prefix in units.items() for group in unit.fsdp_state.groups]


def keys_of_slots(model: nn.Module) -> dict[tuple[FlatGroup, ParamSlot], list[str]]:
    """Every state-dict key of every parameter: several for tied ones and for modules with several paths."""
    keys: dict[tuple[FlatGroup, ParamSlot], list[str]] = {}
    for prefix, unit in units_in(model):
        for group in unit.fsdp_state.groups:
            for slot, sites in zip(group.layout.slots, group.binding.sites, strict=True):
                keys.setdefault((group, slot), []).extend(prefix + site.name for site in sites)
    return keys
