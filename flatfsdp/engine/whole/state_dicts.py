"""State dicts of a model that is sharded in place: they hold whole tensors only, for save and load.

In:   a unit, whose modules list parts of parameters.
Out:  hooks on these modules; a `state_dict` or `load_state_dict` of any module around them runs the hooks.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import Any, NoReturn

from torch import nn

from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.flat.binding import misfit
from flatfsdp.flat.layout import ParamSlot

_Taken = tuple[MasterShard, ParamSlot, nn.Parameter | None]
"""A parameter of a module: its place in a shard, and what the module lists, if anything."""


COPIED = (
    "a sharded module, or a part of one, cannot be copied or pickled: its parameters are spread over ranks; "
    "copy the plain module before it is sharded, or save its state_dict()"
)
"""Words for a copy of a module in a unit."""


class _Hook(partial[None]):
    """A hook of a unit's module; through it a copy of the module would have a copy of the engine."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(COPIED)


def follow_state_dicts(state: Unit) -> None:
    """Registers the hooks of a unit's modules."""
    # A module with two names in the unit loads once.
    taken: dict[nn.Module, dict[str, _Taken]] = {}
    for group in state.groups:
        binding = group.binding
        places = zip(binding.layout.slots, binding.sites, binding.listed or repeat(None), strict=False)
        for slot, sites, listed in places:
            for site in sites:
                taken.setdefault(site.module, {})[site.attribute] = group.master, slot, listed
    for module, parameters in taken.items():
        module.register_state_dict_pre_hook(_Hook(_refuse_parts, state))
        module.register_load_state_dict_pre_hook(_Hook(_load, state, parameters))


def _refuse_parts(state: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not state.is_whole:
        raise RuntimeError(
            f"state_dict() of this {type(module).__name__} would have this rank's parts of its parameters; "
            "call it on the model, or on the sharded module around it, or inside summon_full_params()"
        )


def _load(state: Unit, taken: dict[str, _Taken], _: nn.Module, *arguments: Any) -> None:
    """Takes this rank's part of each value, which the module then copies to what it lists."""
    # As PyTorch passes them to `_load_from_state_dict`, whose hook this is.
    values, prefix, metadata, strict, missing, _unexpected, errors = arguments
    if state.is_whole:
        return
    # With `assign=True` the module would list whole tensors in place of its parts.
    metadata["assign_to_params_buffers"] = False
    for attribute, (master, slot, listed) in taken.items():
        key = prefix + attribute
        if key in values:
            problem = misfit(slot, values[key], key)
            if problem is None:
                master.load(slot, values[key])
            else:
                errors.append(problem)
        if listed is None:
            # The module does not know of the parameter.
            missing += [key] if strict and key not in values else []
            values.pop(key, None)
        elif key in values:
            values[key] = listed.detach()
            # The copy is no write by somebody else.
            master.first_version += 1
