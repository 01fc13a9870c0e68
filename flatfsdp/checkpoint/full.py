"""Full state dicts of model and optimizer: whole tensors, on all ranks or the first; and loading them.

In:   a model and its optimizer; or dicts of whole tensors under the names that the model had before.
Out:  such dicts; or the shards, filled with this rank's parts of the tensors.

The optimizer's state has whole tensors under the same names.  Any number of ranks, and any engine, can read
these dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_map_only

from flatfsdp.checkpoint import optimizer_state
from flatfsdp.comm.collectives import all_gather, gather, scatter
from flatfsdp.comm.grid import require_same_ranks
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.full_params import state_dicts_gathered
from flatfsdp.engine.whole.units import Model, keys_of_slots, named_groups
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.optim.joined import STEP
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
    if rank0_only and not all(group.grid.is_first_of_data for _, group in groups):
        return {}
    if cpu_offload:
        state = tree_map_only(Tensor, torch.Tensor.cpu, dict(state))
    for (group, slot), keys in keys_of_slots(model).items():
        whole = joined(state[keys[0]].detach(), slot, group.master, rank0_only=rank0_only)
        if slot.partition is not None and whole is not None:
            state.update(dict.fromkeys(keys, whole))
    return {} if rank0_only and not groups[0][1].grid.is_first else state


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
    require_same_ranks((group.grid for _, group in groups), "loading from one rank")
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
        problems = [f"Missing key: {key}" for key in loaded.missing_keys]
        _raise_if(problems + [f"Unexpected key: {key}" for key in loaded.unexpected_keys])
    for _, group in groups:
        full = group.master.gather(rank0_only=True)
        if full is not None:
            slots = ((slot, key) for slot in group.layout.slots for key in keys[group, slot])
            fill(full, group.master, {slot: state_dict.get(key) for slot, key in slots if key in given})
        group.master.store_from_rank0(full)
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


def full_optimizer_state_dict(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
) -> dict[str, Any]:
    """Gathers the optimizer's state, also over tensor-parallel ranks.  Collective.

    Args:
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer over all parameters of `model`.
        rank0_only: give the dict to the first rank only; others get an empty one.
        cpu_offload: put tensors in CPU memory; the device holds one state of one unit at a time.

    Returns:
        {"state": {name: {key: tensor of the parameter's shape, or a number}},
         "param_groups": [{**options, "params": [names]}]}

    Raises:
        ValueError: if the optimizer is not over this model's shards.
        TypeError: if it has states that are neither one number nor as large as the parameter.
    """
    masters = optimizer_state.trained_masters(model, optimizer)
    states = optimizer_state.described(masters, optimizer).states
    whole: dict[str, dict[str, Any]] = {name: dict(state.values) for name, state in states.items()}
    for prefix, master in masters:
        for key, dtype in optimizer_state.element_dtypes(prefix, master, states).items():
            shard = optimizer_state.state_shard(master, optimizer, key, dtype)
            full = master.gather(shard, rank0_only=rank0_only)
            views = [] if full is None else master.layout.views(full)
            for slot, view in zip(master.layout.slots, views, strict=False):
                name = prefix + slot.name
                if name in states and key in states[name].elements:
                    tensor = joined(view, slot, master, rank0_only=rank0_only)
                    if tensor is not None:
                        whole[name][key] = tensor.to("cpu" if cpu_offload else tensor.device, copy=True)
    settle(group for _, group in named_groups(model))
    if rank0_only and not masters[0][1].grid.is_first:
        return {}
    state_by_name = {name: state for name, state in whole.items() if state}
    return {"state": state_by_name, "param_groups": optimizer_state.groups_by_name(optimizer, states)}


def load_full_optimizer_state_dict(
    model: Model,
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    *,
    from_rank0: bool = False,
) -> None:
    """Loads a result of `full_optimizer_state_dict`, on any number of ranks.  Collective.

    Args:
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer over all parameters of `model`.
        state_dict: state to load.
        from_rank0: use the first rank's dict only; the others pass {}, and never hold a whole tensor.

    Raises:
        ValueError: on every rank, if names, shapes or parameter groups do not fit; nothing is changed.
    """
    masters = optimizer_state.trained_masters(model, optimizer)
    if from_rank0:
        require_same_ranks((master.grid for _, master in masters), "loading from one rank")
        state_dict = state_dict if masters[0][1].grid.is_first else {}
    shapes = {
        prefix + slot.name: slot.whole_shape for prefix, master in masters for slot in master.layout.slots
    }
    problem = _misfit(state_dict, shapes) if state_dict or not from_rank0 else None
    states = described_whole(state_dict.get("state", {}), shapes)
    groups = state_dict.get("param_groups", [])
    if from_rank0:
        first = masters[0][1]
        problem, states, groups = broadcast_object(
            (problem, states, groups), first.grid.dimensions[::-1], first.device
        )
    if problem is not None:
        raise ValueError(problem)

    def shard_of(prefix: str, master: MasterShard, key: str, dtype: torch.dtype) -> Tensor:
        whole, layout, ranks = state_dict.get("state", {}), master.layout, master.grid.tensor
        of_slots = {slot: whole.get(prefix + slot.name, {}).get(key) for slot in layout.slots}
        if not from_rank0:
            return master.cut(lambda slot: own_part(of_slots[slot], slot, ranks), dtype)
        full = None
        if master.grid.is_first_of_data:
            full = torch.zeros(layout.padded_numel(master.grid.shard.size), dtype=dtype, device=master.device)
            has_state = (slot for slot in layout.slots if prefix + slot.name in states)
            given = [slot for slot in has_state if key in states[prefix + slot.name].elements]
            fill(full, master, {slot: of_slots[slot] for slot in given})
        return master.scattered(full, dtype)

    optimizer.load_state_dict(optimizer_state.loadable_state(masters, optimizer, states, groups, shard_of))


def described_whole(
    state: dict[str, dict[str, Any]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, optimizer_state.SlotState]:
    """The state of each parameter, described from whole tensors; see `described`.

    Args:
        state: the states by parameter name.
        shapes: shape of each parameter.
    """
    # A scalar parameter has only scalar states; the other parameters tell which of these are numbers.  If it
    # alone has states, all but the count of steps are elementwise.
    elementwise: set[str] = set()
    numbers = {STEP}
    for name, of_name in state.items():
        for key, value in of_name.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                elementwise.add(key)
            elif shapes.get(name):
                numbers.add(key)
    numbers -= elementwise
    return {
        name: optimizer_state.SlotState(
            0,
            {key: v.dtype for key, v in of_name.items() if isinstance(v, Tensor) and key not in numbers},
            {key: v for key, v in of_name.items() if not isinstance(v, Tensor) or key in numbers},
        )
        for name, of_name in state.items()
    }


def _misfit(state_dict: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Says what is wrong with a state to be loaded; None if nothing is."""
    if set(state_dict) != {"state", "param_groups"}:
        return f'an optimizer state has the keys "state" and "param_groups", this has {sorted(state_dict)}'
    for name, of_name in state_dict["state"].items():
        if name not in shapes:
            return optimizer_state.not_trained(name)
        for key, value in of_name.items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != shapes[name]:
                shape = tuple(value.shape)
                return f"{key!r} of {name} has shape {shape} in the state and {shapes[name]} in the model"
    return None


def joined(part: Tensor, slot: ParamSlot, master: MasterShard, *, rank0_only: bool) -> Tensor | None:
    """Joins a whole tensor, on the device of `part`.  Collective over tensor-parallel ranks if split.

    Args:
        part: this rank's part, of the slot's shape.
        slot: slot of the parameter.
        master: the master shard that the slot is in.
        rank0_only: give the result to the first tensor-parallel rank only; None on the others.
    """
    ranks = master.grid.tensor
    is_given = not rank0_only or ranks.rank == 0
    if slot.partition is None or ranks.size == 1:
        return part if is_given else None
    own = part.to(master.device).reshape(-1).contiguous()
    everyones = own.new_empty(ranks.size * own.numel()) if is_given else None
    if rank0_only:
        gather(everyones, own, ranks)
    elif everyones is not None:
        all_gather(everyones, own, ranks)
    if everyones is None:
        return None
    return slot.partition.join(everyones.view(ranks.size, *slot.shape).unbind()).to(part.device)


def own_part(value: Any, slot: ParamSlot, ranks: Ranks) -> Any:
    """This rank's part, a copy or a view, of a whole tensor; what is none is left as it is."""
    if slot.partition is None or ranks.size == 1:
        return value
    if not isinstance(value, Tensor) or tuple(value.shape) != slot.whole_shape:
        return value
    return part_of(value, slot.partition.dim, slot.partition.sizes, ranks)


def fill(full: Tensor, master: MasterShard, given: Mapping[ParamSlot, Any]) -> None:
    """Fills slots of a whole padded buffer with this tensor-parallel rank's parts of whole tensors.

    Collective over the tensor-parallel ranks, slot by slot: none of them has more than one whole tensor.

    Args:
        full: the buffer.
        master: a master shard with the layout of the buffer.
        given: slots to fill, on all these ranks, and on the first of them their whole tensors.
    """
    ranks = master.grid.tensor
    for slot, view in zip(master.layout.slots, master.layout.views(full), strict=True):
        if slot in given:
            own, parts = view.new_empty(slot.numel), None
            if ranks.rank == 0:
                of_ranks = (Ranks(ranks.group, ranks.size, rank) for rank in range(ranks.size))
                parts = torch.cat([own_part(given[slot], slot, of).to(own).reshape(-1) for of in of_ranks])
            scatter(own, parts, ranks)
            view.copy_(own.view(slot.shape))
