"""State dicts of a model that is sharded in place: they hold whole tensors only, for save and load.

In:   a unit, whose modules list parts of parameters.
Out:  hooks on these modules; a `state_dict` or `load_state_dict` of any module around them runs the hooks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.flat.module_wrapper import misfit

_Listed = list[tuple[str, MasterShard, ParamSlot, nn.Parameter]]
"""Parameters that a module lists: name of the attribute, place in a shard, and this rank's part."""


def follow_state_dicts(state: Unit) -> None:
    """Registers the hooks of a unit's modules."""
    listed: dict[nn.Module, _Listed] = {}
    for group in state.groups:
        binding = group.binding
        for slot, sites, view in zip(binding.layout.slots, binding.sites, binding.listed, strict=True):
            for site in sites:
                listed.setdefault(site.module, []).append((site.attribute, group.master, slot, view))
    for module, parameters in listed.items():
        module.register_state_dict_pre_hook(partial(_refuse_parts, state))
        module.register_load_state_dict_pre_hook(partial(_load, state, parameters))


def _refuse_parts(state: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not state.is_whole:
        raise RuntimeError(
            f"state_dict() of this {type(module).__name__} would have this rank's parts of its parameters; "
            "call it on the model, or on the sharded module around it, or inside summon_full_params()"
        )


def _load(
    state: Unit, listed: _Listed, _: nn.Module, values: Any, prefix: str, metadata: Any, *reports: Any
) -> None:
    """Takes this rank's part of each value, which the module then copies to itself."""
    if state.is_whole:
        return
    # With `assign=True` the module would list whole tensors in place of its parts.
    metadata["assign_to_params_buffers"] = False
    for attribute, master, slot, view in listed:
        key = prefix + attribute
        if key not in values:
            continue
        problem = misfit(slot, values[key], key)
        if problem is None:
            master.load(slot, values[key])
        else:
            # Error messages are the last of the reports: missing keys, unexpected ones, messages.
            reports[-1].append(problem)
        values[key] = view.detach()
        # The copy is no write by somebody else.
        master.first_version += 1
