"""`UnitModule` and its `UnitState`; the root, units, flat groups and parameter names of a model.

In:   a module, with its policy, ranks and device.
Out:  functions that find all units of a model, each with the prefix of its parameters' names.
Next: `build.py` takes the parameters, `call.py` runs the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flatfsdp.byte_ledger import ByteLedger
from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.grid import Grid
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.guards.other_engines import Guarded
from flatfsdp.engine.input_casts import cast_in_front_of_modules
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.flat.layout import ParamSlot, Role
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import Policy


@dataclass(eq=False)
class UnitState:
    """Engine state of one sharded module: the one attribute through which others ask.

    Attributes:
        policy: settings that the user has chosen.
        grid: the ranks over which its parameters are sharded, replicated and split.
        device: device that it computes and communicates on.
        unit: its flat groups, in forward and backward.
        microbatch: which microbatch this is; shared with the inner units of a root.
        ledger: counter of bytes moved; shared with the inner units of a root.
        outer: the module around it that was sharded in place; None for the outermost one and for wrappers.
        root: state of the whole model; None before the model is used.
        uses: number of running calls of the module, or of parts of it.
        is_whole: whether its parameters are ordinary ones for now, inside `summon_full_params`.
        writes_back: whether these are written back at the end.
        casts: hooks that cast inputs of modules, while it is the outermost unit.
    """

    policy: Policy
    grid: Grid
    device: torch.device
    unit: Unit
    microbatch: Microbatch
    ledger: ByteLedger
    outer: weakref.ref[UnitModule] | None = None
    root: Root | None = None
    uses: int = 0
    is_whole: bool = False
    writes_back: bool = False
    casts: list[RemovableHandle] = field(default_factory=list)


class UnitModule(Guarded):
    """A sharded module, wrapped or in place, for code that walks over a model.

    Attributes:
        fsdp_state: engine state of the module.
    """

    fsdp_state: UnitState

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names that differ in state dicts: none.

        PyTorch's state-dict functions call this before they read or gather anything; from here on, they work
        on sharded models.
        """
        # By its name: the engine does not depend on what is built on it.
        import_module("flatfsdp.compat.torch_state_dicts.functions").install()
        return {}

    def _join(self, root: Root, outermost: UnitModule) -> None:
        """Joins a root, once, when the model is first used.

        Args:
            root: state that all units of the model share.
            outermost: the root's module; may be this one.
        """
        state, shared = self.fsdp_state, outermost.fsdp_state
        state.root = state.unit.root = root
        state.microbatch, state.ledger = shared.microbatch, shared.ledger
        for cast in state.casts:  # a layer that was a model of its own before
            cast.remove()
        state.casts, state.unit.casts_to = [], None
        compute = state.policy.precision.compute
        if state.policy.cast_inputs and compute is not torch.float32:
            if self is outermost:
                state.casts = cast_in_front_of_modules(state.unit, compute)
            else:
                state.unit.casts_to = compute


def root_of(wrapped: UnitModule) -> Root:
    """Returns the root of `wrapped`; the first call makes `wrapped` the root of all units inside it.

    Collective the first time: checks that all ranks have built the same model, and makes replicas equal.

    Raises:
        RuntimeError: on all ranks, if the ranks have built different models.
        ValueError: if units inside differ from the root in settings that the whole model must share.
    """
    state = wrapped.fsdp_state
    if state.root is not None:
        return state.root
    if state.outer is not None and (outer := state.outer()) is not None:
        # A layer that is called before the model around it.
        return root_of(outer)
    inside: dict[UnitModule, str] = {}
    for prefix, unit in units_in(wrapped):
        # A module with two paths is one unit, under its first name.
        inside.setdefault(unit, prefix)
    for unit, prefix in inside.items():
        for group in unit.fsdp_state.unit.groups:
            group.prefix = prefix
    groups = [group for unit in inside for group in unit.fsdp_state.unit.groups]
    lines = [line for group in groups for line in group.describe()]
    timeout = state.policy.timeout
    number = check_same_on_all_ranks(lines, state.grid.dimensions, state.device, timeout)
    if any(group.grid.num_ranks > state.grid.num_ranks for group in groups):
        # Ranks of other roots, which have agreed on another number, share units inside.
        number = 0
    wants_fp8 = any(group.policy.precision.fp8_weights is not None for group in groups)
    if wants_fp8 and not any(group.layout.role is Role.FP8 for group in groups):
        raise ValueError(
            "Precision.fp8_weights is set, and no layer has a weight that only FP8 GEMMs read; use the "
            "layers of flatfsdp.layers, or flatfsdp.layers.convert, or leave fp8_weights out"
        )
    for unit, prefix in inside.items():
        _require_same_settings(unit.fsdp_state, state, prefix.rstrip("."))
    root = Root(
        [unit.fsdp_state.unit for unit in inside],
        state.device,
        state.policy.prefetch,
        # Without sharding there is no shard to keep a sum in.
        state.policy.grad_sync == "every" and any(group.grid.shard.size > 1 for group in groups),
        state.microbatch,
        state.ledger,
        number,
        timeout,
    )
    for unit in inside:
        unit._join(root, wrapped)
    state.ledger.parameters += sum(slot.numel for group in groups for slot in group.layout.slots)
    return root


def _require_same_settings(inner: UnitState, outer: UnitState, name: str) -> None:
    """Checks settings that the whole model must share.

    Args:
        inner: state of a unit inside.
        outer: state of the root.
        name: name of the unit inside.

    Raises:
        ValueError: if one of them differs.
    """
    if inner.device != outer.device:
        raise ValueError(f"unit {name} is on {inner.device}, but its root on {outer.device}")
    if inner.grid.tensor != outer.grid.tensor:
        raise ValueError(f"unit {name} has another tp_group than its root; pass the same one to both")
    for what in ("grad_sync", "prefetch", "timeout"):
        ours, theirs = getattr(outer.policy, what), getattr(inner.policy, what)
        if theirs != ours:
            raise ValueError(f"unit {name} has {what}={theirs!r}, but its root {ours!r}; make them equal")


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
        found = list(units_in(stage))
        if not found:
            raise ValueError(f"{type(stage).__name__} contains no unit of FlatFSDP; shard or wrap it first")
        for prefix, wrapped in found:
            units.setdefault(wrapped, prefix)
    for wrapped in units:
        root_of(wrapped)
    return [(prefix, group) for wrapped, prefix in units.items() for group in wrapped.fsdp_state.unit.groups]


def keys_of_slots(model: nn.Module) -> dict[tuple[FlatGroup, ParamSlot], list[str]]:
    """Every state-dict key of every parameter: several for tied ones and for modules with several paths."""
    keys: dict[tuple[FlatGroup, ParamSlot], list[str]] = {}
    for prefix, wrapped in units_in(model):
        for group in wrapped.fsdp_state.unit.groups:
            for slot, sites in zip(group.layout.slots, group.binding.sites, strict=True):
                keys.setdefault((group, slot), []).extend(prefix + site.name for site in sites)
    return keys
