"""State dicts of a model that is sharded in place: they hold whole tensors only, for save and load.

In:   a unit, whose modules list parts of parameters.
Out:  hooks on these modules; a `state_dict` or `load_state_dict` of any module around them runs the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.flat.module_wrapper import misfit


class _Listed(NamedTuple):
    """A parameter that a module lists.

    Attributes:
        attribute: name of the attribute in the module.
        view: this rank's part of the parameter.
    """

    attribute: str
    master: MasterShard
    slot: ParamSlot
    view: nn.Parameter


def follow_state_dicts(state: Unit) -> None:
    """Registers the hooks of a unit's modules."""
    listed: dict[nn.Module, list[_Listed]] = {}
    for group in state.groups:
        binding = group.binding
        for slot, sites, view in zip(binding.layout.slots, binding.sites, binding.listed, strict=True):
            for site in sites:
                listed.setdefault(site.module, []).append(_Listed(site.attribute, group.master, slot, view))
    for module, parameters in listed.items():
        module.register_state_dict_pre_hook(_refuse_parts(state))
        module.register_load_state_dict_pre_hook(partial(_load, state, parameters))


def _refuse_parts(state: Unit) -> Callable[..., None]:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not state.is_whole:
            raise RuntimeError(
                f"state_dict() of this {type(module).__name__} would have this rank's parts of its "
                "parameters; call it on the model, or on the sharded module around it, or inside "
                "summon_full_params()"
            )

    return hook


def _load(
    state: Unit,
    parameters: list[_Listed],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Takes this rank's part of each value, which the module then copies to itself."""
    if state.is_whole:
        return
    local_metadata["assign_to_params_buffers"] = False
    for attribute, master, slot, view in parameters:
        key = prefix + attribute
        if key not in state_dict:
            continue
        problem = misfit(slot, state_dict[key], key)
        if problem is None:
            master.load(slot, state_dict[key])
        else:
            error_msgs.append(problem)
        state_dict[key] = view.detach()
        # The copy is no write by somebody else.
        master.first_version += 1
