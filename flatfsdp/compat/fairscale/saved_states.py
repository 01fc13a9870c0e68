"""fairscale's formats of saved states: flat shards of all ranks, and optimizer states by numbers.

In:   a dict of tensors and a dict of metadata from every rank, in rank order, also fairscale's own; or a
      model and its optimizer.
Out:  whole tensors under the names of the plain module; or the optimizer's state in this format:

    {"state": {number: {key: tensor of the parameter's shape, or a number, or [a tensor without dimensions]}},
     "param_groups": [{**options, "params": [all numbers]}],
          "param_id_map": {number of a parameter: number of its flat parameter, or None if that has no state},
          "uncollected_local_ids": [numbers of flat parameters whose state is the first rank's only]}

Parameters are numbered unit by unit, outer units first, frozen ones included; flat parameters in the order of
`model.parameters()`.  Neither depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatfsdp.checkpoint import consolidate, full_optimizer_state_dict
from flatfsdp.checkpoint.full import described_whole
from flatfsdp.engine.guards.optimizers import PART
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import UnitModule, distinct_units, named_groups
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.optim.joined import STEP


def consolidate_shard_weights(
    shard_weights: Sequence[dict[str, Tensor]],
    shard_metadata: Sequence[dict[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Joins every rank's `local_state_dict()`, described by its `local_metadata_dict()`.

    Also reads what fairscale's methods of these names have saved.  Needs no process group.  For units that
    each rank has to itself (an expert in a group of one), the result has the first rank's values.

    Args:
        shard_weights: the state dicts, in rank order.
        shard_metadata: the metadata, in rank order.
        with_module_buffers: also return the first rank's buffers.
        strict: False skips flat parameters that the first rank's weights lack.

    Raises:
        ValueError: unless there is one pair per rank; if a shard is missing or has the wrong length; if
            groups of several ranks have different parameters.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        count = len(shard_weights)
        raise ValueError(f"{count} shards and {len(shard_metadata)} metadata; pass one pair a rank")
    if "param_metadata" in shard_metadata[0]:
        full = dict(_parameters_of_fairscale(shard_weights, shard_metadata, strict))
        names = shard_metadata[0]["buffer_names"]
        buffers = {name: shard_weights[0][name] for name in names if strict or name in shard_weights[0]}
    else:
        first = shard_weights[0]
        shards = {k: v for k, v in shard_metadata[0]["shards"].items() if strict or k in first}
        # The mark is absent in older files, and in those of `flatfsdp.checkpoint`.
        alone = {
            key: first[key]
            for key, about in shards.items()
            if about.get("no_broadcast_optim_state") and about["num_shards"] == 1 and key in first
        }
        metadata = [{**shard_metadata[0], "shards": shards}, *shard_metadata[1:]]
        joined = consolidate([{**of_rank, **alone} for of_rank in shard_weights], metadata)
        buffers = {name: joined[name] for name in joined if name in first}
        full = {name: value for name, value in joined.items() if name not in buffers}
    return {**full, **buffers} if with_module_buffers else full


def _parameters_of_fairscale(
    weights: Sequence[dict[str, Tensor]], metadata: Sequence[dict[str, Any]], strict: bool
) -> Iterator[tuple[str, Tensor]]:
    """Parameters from fairscale's shards, which hold them back to back with padding only at a shard's end."""
    for index, unit in enumerate(metadata[0]["param_metadata"]):
        found: dict[str, Tensor] = {}
        for flat_name, about in unit["params"].items():
            key = _join(unit["fsdp_path"], flat_name)
            if key not in weights[0] and not strict:
                continue
            shards = []
            for rank in range(1 if unit["no_broadcast_optim_state"] else len(weights)):
                padding = metadata[rank]["param_metadata"][index]["params"][flat_name]["padding"]
                shard = weights[rank][key]
                shards.append(shard[: shard.numel() - padding])
            flat = torch.cat(shards)
            if flat.numel() != sum(about["numels"]):
                found_and_needed = f"{flat.numel()} elements, but its parameters {sum(about['numels'])}"
                raise ValueError(f"{key} has {found_and_needed}; pass the files of all ranks")
            views = zip(about["names"], flat.split(about["numels"]), about["shapes"], strict=True)
            found.update((_join(unit["fsdp_path"], name), view.view(shape)) for name, view, shape in views)
        yield from found.items()
        for source, tied in unit["shared_param_info"]:
            # fairscale has swapped the attributes' names.
            source_module, _, tied_name = source.rpartition(".")
            tied_module, _, source_name = tied.rpartition(".")
            original = _join(unit["fsdp_path"], _join(source_module, source_name))
            if original in found:
                yield _join(unit["fsdp_path"], _join(tied_module, tied_name)), found[original]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def gather_full(model: UnitModule, optimizer: Optimizer) -> dict[str, Any] | None:
    """The whole state on the first rank, on the CPU; None on the others.  Collective.

    Raises:
        AssertionError: if the optimizer has several parameter groups.
    """
    way_out = "flatfsdp.checkpoint.full_optimizer_state_dict has several"
    assert len(optimizer.param_groups) == 1, f"fairscale's format has one parameter group; {way_out}"
    by_name = full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu_offload=True)
    if model.fsdp_state.grid.shard.rank != 0:
        return None
    groups = named_groups(model)
    shapes = {prefix + slot.name: slot.shape for prefix, group in groups for slot in group.layout.slots}
    described = described_whole(by_name["state"], shapes)
    state: dict[int, dict[str, Any]] = {}
    param_id_map: dict[int, int | None] = {}
    for local_id, (prefix, group) in enumerate(groups):
        names = [prefix + slot.name for slot in group.layout.slots]
        has_state = any(name in described for name in names)
        for number, name in enumerate(names, start=len(param_id_map)):
            param_id_map[number] = local_id if has_state else None
            if name in described:
                numbers = {key: _outgoing(key, value) for key, value in described[name].values.items()}
                state[number] = {**by_name["state"][name], **numbers}
    options = {key: value for key, value in by_name["param_groups"][0].items() if key != "params"}
    extra = {key: value for key, value in optimizer.state_dict().items() if key not in (*by_name, PART)}
    units = [unit for unit in distinct_units(model) for _ in unit.fsdp_state.groups]
    return {
        **extra,
        "state": state,
        "param_groups": [{**options, "params": list(param_id_map)}],
        "param_id_map": param_id_map,
        "uncollected_local_ids": [n for n, unit in enumerate(units) if is_uncollected(unit, model)],
    }


def _outgoing(key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # The same on all ranks.
    return value.item() if key == STEP else [value]


def is_uncollected(unit: UnitModule, model: UnitModule) -> bool:
    """Whether each rank has this unit to itself, or its state was declared as not collected."""
    is_alone = unit.fsdp_state.grid.num_ranks == 1 < model.fsdp_state.grid.num_ranks
    lister = unit.fsdp_state.lister
    wrapper = None if lister is None else lister()
    return is_alone or bool(getattr(wrapper, "no_broadcast_optim_state", False))


def shard_of(model: UnitModule, full: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, for `optimizer.load_state_dict`.

    Raises:
        ValueError: if the state is not of this model, wrapped in the same units.
    """
    groups = [group for _, group in named_groups(model)]
    count, saved = sum(len(group.layout.slots) for group in groups), len(full["param_id_map"])
    if list(full["param_id_map"]) != list(range(count)):
        raise ValueError(f"the optimizer state has {saved} parameters and this model {count}; load its own")
    numbers = iter(range(count))
    numbered = [{next(numbers): slot for slot in group.layout.slots} for group in groups]
    for local_id, slots in enumerate(numbered):
        _check_fits(local_id, slots, full)
    state = {
        local_id: _flat_state(group.master, slots, full["state"], model.fsdp_state.grid.shard.rank)
        for local_id, (group, slots) in enumerate(zip(groups, numbered, strict=True))
        if not slots.keys().isdisjoint(full["state"])
    }
    added = ("param_id_map", "uncollected_local_ids")
    return {
        **{key: value for key, value in full.items() if key not in added},
        "state": state,
        "param_groups": [{**group, "params": list(range(len(groups)))} for group in full["param_groups"]],
    }


def _check_fits(local_id: int, slots: Mapping[int, ParamSlot], full: dict[str, Any]) -> None:
    for number, slot in slots.items():
        found = full["param_id_map"][number]
        if found not in (None, local_id):
            raise ValueError(
                f"{slot.name} is in flat parameter {local_id} of this model, but was in {found} when the "
                "optimizer state was saved; wrap the same modules"
            )
        for key, value in full["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != slot.shape:
                raise ValueError(
                    f"{key!r} of parameter {number} has shape {tuple(value.shape)} in the optimizer state, "
                    f"but {slot.name} has {slot.shape}; load the state of this model"
                )


def _flat_state(
    master: MasterShard, slots: Mapping[int, ParamSlot], state: dict[int, dict[str, Any]], rank: int
) -> dict[str, Any]:
    """The optimizer's state of one flat shard."""
    states = {slot: state.get(number, {}) for number, slot in slots.items()}
    # The first parameter that has a number has it for all.
    values = {key: value for each in reversed(states.values()) for key, value in each.items()}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        # Fairscale puts single numbers in lists, so a 0-dim tensor is the state of a scalar parameter.
        if isinstance(value, Tensor) and key != STEP:
            wholes = {slot: each.get(key) for slot, each in states.items()}
            flat[key] = master.cut(wholes.get, value.dtype)
        elif isinstance(value, list):
            flat[key] = value[rank] if rank < len(value) else value[0]
        else:
            flat[key] = value
    return flat
