"""Full state dicts: whole parameters in one dict, with a choice of ranks and device; and loading them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_map_only

from flatfsdp.checkpoint.tp_parts import joined, own_part, scattered_part
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.master import require_same_ranks
from flatfsdp.engine.whole.full_params import state_dicts_gathered
from flatfsdp.engine.whole.units import keys_of_slots, named_groups
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.options import Gathering


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """The whole state dict, with a choice of where the tensors go.  Collective.

    For a tensor-parallel model the tensors are whole, too, while `state_dict()` has this rank's parts.

    Args:
        model: the wrapped or sharded model.
        rank0_only: give the dict to the first rank only; others get an empty one.
        cpu_offload: put tensors in CPU memory; the device holds the parameters of one unit at a time.
    """
    groups = named_groups(model)
    with state_dicts_gathered(Gathering(rank0_only, cpu_offload)):
        state = model.state_dict()
    if rank0_only and not all(group.master.is_first_rank for _, group in groups):
        return {}
    if cpu_offload:
        state = tree_map_only(Tensor, torch.Tensor.cpu, dict(state))
    _join_parts(state, model, rank0_only)
    return {} if rank0_only and not groups[0][1].grid.is_first else state


def _join_parts(state: dict[str, Any], model: nn.Module, rank0_only: bool) -> None:
    """Replaces this tensor-parallel rank's parts by whole tensors.  Collective over these ranks."""
    for (group, slot), keys in keys_of_slots(model).items():
        whole = joined(state[keys[0]].detach(), slot, group.grid, group.master.device, rank0_only=rank0_only)
        if slot.partition is not None and whole is not None:
            state.update(dict.fromkeys(keys, whole))


def load_full_state_dict(
    model: nn.Module, state_dict: dict[str, Any], *, from_rank0: bool = False, strict: bool = True
) -> _IncompatibleKeys:
    """Loads a result of `full_state_dict`, or of the unwrapped model's `state_dict()`.

    In a tensor-parallel model, each rank takes its parts of the whole tensors.

    Args:
        model: the wrapped or sharded model.
        state_dict: whole tensors under the original names.
        from_rank0: use the first rank's dict only; the others pass {}.  Collective.  Other ranks never hold a
            whole parameter, or, with tensor parallelism, all its parts.
        strict: raise for missing or unexpected keys.

    Returns:
        The keys that were missing and unexpected, as `model.load_state_dict` does; none if `strict`.

    Raises:
        RuntimeError: on every rank, for missing or unexpected keys (if `strict`) or wrong shapes.
    """
    keys = keys_of_slots(model)
    if not from_rank0:
        own = {
            key: own_part(state_dict[key], slot, group.grid.tensor)
            for (group, slot), of_slot in keys.items()
            for key in of_slot
            if key in state_dict
        }
        return model.load_state_dict({**state_dict, **own}, strict)
    groups = named_groups(model)
    require_same_ranks((group.master for _, group in groups), "loading from one rank")
    first = groups[0][1].master
    taken = {key for of_slot in keys.values() for key in of_slot}
    problems: list[str] = []
    rest: dict[str, Any] = {}
    given: list[str] = []
    if first.grid.is_first:
        problems = _problems(state_dict, keys, strict)
        rest = {key: value for key, value in state_dict.items() if key not in taken}
        given = list(state_dict)
    problems, rest, given = broadcast_object(
        (problems, rest, given), first.grid.dimensions[::-1], first.device
    )
    _raise_if(problems)
    loaded: _IncompatibleKeys = model.load_state_dict(rest, strict=False)
    loaded = _IncompatibleKeys(
        [key for key in loaded.missing_keys if key not in given], loaded.unexpected_keys
    )
    if strict:
        _raise_if([f"Missing key: {key}" for key in loaded.missing_keys])
        _raise_if([f"Unexpected key: {key}" for key in loaded.unexpected_keys])
    for _, group in groups:
        group.master.store_from_rank0(_whole_buffer(group, state_dict, set(given), keys))
    return loaded


def _problems(
    state_dict: dict[str, Any], keys: dict[tuple[FlatGroup, ParamSlot], list[str]], strict: bool
) -> list[str]:
    found = []
    for (_, slot), of_slot in keys.items():
        for key in of_slot:
            if key not in state_dict:
                found += [f"Missing key: {key}"] if strict else []
            elif not isinstance(state_dict[key], Tensor):
                found.append(f"{key} is no tensor, but {type(state_dict[key]).__name__}")
            elif tuple(state_dict[key].shape) != slot.whole_shape:
                shapes = f"{tuple(state_dict[key].shape)} in the checkpoint, {slot.whole_shape} in the model"
                found.append(f"size mismatch for {key}: {shapes}")
    return found


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise RuntimeError("the state dict does not fit the model:\n\t" + "\n\t".join(problems))


def _whole_buffer(
    group: FlatGroup,
    state_dict: dict[str, Any],
    given: set[str],
    keys: dict[tuple[FlatGroup, ParamSlot], list[str]],
) -> Tensor | None:
    """Makes the padded buffer from `state_dict` on the first data-parallel rank; None elsewhere.

    Collective.

    Args:
        group: the flat group to fill.
        state_dict: state dict of the first of all ranks.
        given: keys of that state dict, known on all ranks.
        keys: state-dict keys of each slot.
    """
    full = group.master.gather(rank0_only=True)
    if full is None:
        return None
    for slot, view in zip(group.layout.slots, group.layout.views(full), strict=True):
        for key in keys[group, slot]:
            if key in given:
                value = state_dict[key] if group.grid.is_first else None
                view.copy_(scattered_part(value, slot, group.grid, view))
    return full
