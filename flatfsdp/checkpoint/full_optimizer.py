"""Optimizer state with whole tensors under the original names: any world size, any engine can read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfsdp.checkpoint.optimizer_state import (
    SlotState,
    described,
    groups_by_name,
    loadable_state,
    not_trained,
    state_shard,
    trained_masters,
)
from flatfsdp.checkpoint.tp_parts import joined, own_part, parts
from flatfsdp.comm.collectives import scatter
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.engine.storage.group import settle
from flatfsdp.engine.storage.master import MasterShard, require_same_ranks
from flatfsdp.engine.whole.units import Model, named_groups
from flatfsdp.optim.joined import STEP


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
    masters = trained_masters(model, optimizer)
    states = described(masters, optimizer).states
    whole: dict[str, dict[str, Any]] = {name: dict(state.values) for name, state in states.items()}
    for prefix, master in masters:
        slots = [slot for slot in master.layout.slots if prefix + slot.name in states]
        dtypes = {k: d for slot in slots for k, d in states[prefix + slot.name].elements.items()}
        for key, dtype in sorted(dtypes.items()):
            full = master.gather(state_shard(master, optimizer, key, dtype), rank0_only=rank0_only)
            if full is None:
                continue
            for slot, view in zip(master.layout.slots, master.layout.views(full), strict=True):
                state = states.get(prefix + slot.name)
                if state is not None and key in state.elements:
                    tensor = joined(view, slot, master.grid, master.device, rank0_only=rank0_only)
                    if tensor is not None:
                        whole[prefix + slot.name][key] = (
                            tensor.to("cpu", copy=True) if cpu_offload else tensor.clone()
                        )
    settle(group for _, group in named_groups(model))
    if rank0_only and not masters[0][1].grid.is_first:
        return {}
    state_by_name = {name: state for name, state in whole.items() if state}
    return {"state": state_by_name, "param_groups": groups_by_name(optimizer, states)}


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
    masters = trained_masters(model, optimizer)
    if from_rank0:
        require_same_ranks((master for _, master in masters), "loading from one rank")
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
        whole = state_dict.get("state", {})
        if from_rank0:
            full = _whole_buffer(prefix, master, key, dtype, whole) if master.is_first_rank else None
            return master.scattered(full, dtype)
        return master.cut(
            lambda slot: own_part(whole.get(prefix + slot.name, {}).get(key), slot, master.grid.tensor), dtype
        )

    optimizer.load_state_dict(loadable_state(masters, optimizer, states, groups, shard_of))


def described_whole(
    state: dict[str, dict[str, Any]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, SlotState]:
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
        name: SlotState(
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
            return not_trained(name)
        for key, value in of_name.items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != shapes[name]:
                shape = tuple(value.shape)
                return f"{key!r} of {name} has shape {shape} in the state and {shapes[name]} in the model"
    return None


def _whole_buffer(
    prefix: str, master: MasterShard, key: str, dtype: torch.dtype, whole: dict[str, dict[str, Any]]
) -> Tensor:
    """Makes the padded buffer of one state from the whole tensors of the first tensor-parallel rank.

    Collective over these ranks.
    """
    layout, ranks = master.layout, master.grid.tensor
    full = torch.zeros(layout.padded_numel(master.grid.shard.size), dtype=dtype, device=master.device)
    everyones = full.new_zeros(ranks.size, full.numel()) if ranks.rank == 0 else None
    for number, slot in enumerate(layout.slots if everyones is not None else ()):
        value = whole.get(prefix + slot.name, {}).get(key)
        if value is not None:
            assert everyones is not None
            for of_rank, part in zip(everyones, parts(value, slot, ranks), strict=True):
                layout.views(of_rank)[number].copy_(part)
    scatter(full, None if everyones is None else everyones.view(-1), ranks)
    return full
