"""For torch.distributed.checkpoint: every rank writes and reads its own part, as boxes of the whole tensors.

A checkpoint written here holds ordinary tensors under the original names, so any number of ranks, another
engine, or `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` can read it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flatfsdp.checkpoint.boxes import boxes
from flatfsdp.checkpoint.local import adopt_late_buffers, persistent_buffers
from flatfsdp.checkpoint.optimizer_state import (
    SlotState,
    described,
    groups_by_name,
    install,
    state_shard,
    trained_masters,
)
from flatfsdp.fsdp import named_groups
from flatfsdp.layout import ParamSlot
from flatfsdp.master import MasterShard, require_same_ranks


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Writes model and optimizer to a folder, each rank its part.  Collective."""
    state: dict[str, Any] = {"model": sharded_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = sharded_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=path)


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Reads what `save` has written, with any number of ranks.  Collective.

    Raises:
        ValueError: if the checkpoint has no optimizer state, or one that does not fit.
        torch.distributed.checkpoint.CheckpointException: if something is missing or has another shape.
    """
    if optimizer is not None:
        _load_optimizer(path, model, optimizer)
    absent = adopt_late_buffers(model, _saved_shapes(path))
    state = {key: value for key, value in sharded_state_dict(model).items() if key not in absent}
    dcp.load({"model": state}, checkpoint_id=path)
    for _, group in named_groups(model):
        group.master.generation += 1


def _saved_shapes(path: str | os.PathLike[str]) -> dict[str, torch.Size]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {
        metadata.planner_data[key][1]: about.size
        for key, about in metadata.state_dict_metadata.items()
        if metadata.planner_data[key][0] == "model" and isinstance(about, TensorStorageMetadata)
    }


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Parameters as ShardedTensors (plain ones if not sharded) and buffers, for `dcp.save` and `dcp.load`.

    They alias the master shards, so `dcp.load` loads in place.  A tied parameter has its first name.  For
    `dcp.async_save` pass `async_stager=BlockingAsyncStager()` and a gloo process group of its own.  What
    a module's `get_extra_state` returns is not in it.

    Raises:
        ValueError: if some units are spread over fewer ranks than others.
    """
    groups = named_groups(model)
    require_same_ranks((group.master for _, group in groups), "a sharded checkpoint")
    for _, group in groups:
        # A load in place may reach the shards of some ranks only; all of them cast and gather anew.
        group.master.generation += 1
    parameters = {
        prefix + slot.name: _sharded(group.master, slot, group.master.flat.detach())
        for prefix, group in groups
        for slot in group.layout.slots
    }
    return {**parameters, **dict(persistent_buffers(model))}


def sharded_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `full_optimizer_state_dict`, with ShardedTensors, and parameter groups by number.  Collective.

    Raises:
        ValueError: as `sharded_state_dict`, or if the optimizer is not over this model's shards.
        TypeError: as `full_optimizer_state_dict`.
    """
    masters = trained_masters(model)
    require_same_ranks((master for _, master in masters), "a sharded checkpoint")
    states = described(masters, optimizer).states
    state: dict[str, dict[str, Any]] = {name: dict(slot.values) for name, slot in states.items()}
    for prefix, master in masters:
        shards: dict[str, Tensor] = {}
        for slot in master.layout.slots:
            described_slot = states.get(prefix + slot.name)
            for key, dtype in described_slot.elements.items() if described_slot else ():
                if key not in shards:
                    shards[key] = state_shard(master, optimizer, key, dtype)
                state[prefix + slot.name][key] = _sharded(master, slot, shards[key])
    # A dict, because torch.distributed.checkpoint takes some lists apart and others not.
    groups = {str(index): group for index, group in enumerate(groups_by_name(optimizer, states))}
    return {"state": state, "param_groups": groups}


def _load_optimizer(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    masters = trained_masters(model)
    metadata = dcp.FileSystemReader(path).read_metadata()
    states = _saved_states(metadata)
    shards: dict[tuple[MasterShard, str], Tensor] = {}
    target: dict[str, Any] = {
        "state": {
            name: {key: _place(about) for key, about in state.values.items()}
            for name, state in states.items()
        },
        "param_groups": _saved_groups(metadata),
    }
    for prefix, master in masters:
        for slot in master.layout.slots:
            name = prefix + slot.name
            for key, dtype in states[name].elements.items() if name in states else ():
                shard = shards.setdefault((master, key), torch.zeros_like(master.flat.detach(), dtype=dtype))
                target["state"][name][key] = _sharded(master, slot, shard)
    # Its default planner drops tensors of which this rank has nothing, and then looks for an older format.
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load({"optimizer": target}, checkpoint_id=path, planner=planner)
    loaded = {
        name: SlotState(0, state.elements, {key: target["state"][name][key] for key in state.values})
        for name, state in states.items()
    }
    groups = [target["param_groups"][number] for number in sorted(target["param_groups"], key=int)]
    install(masters, optimizer, loaded, groups, lambda _, master, key, __: shards[master, key])


def _saved_states(metadata: Metadata) -> dict[str, SlotState]:
    """Which states the checkpoint has for each parameter; their values are still to be read."""
    states: dict[str, SlotState] = {}
    for flat_key, about in metadata.state_dict_metadata.items():
        path = metadata.planner_data[flat_key]
        if path[:2] != ("optimizer", "state"):
            continue
        _, _, name, key = path
        state = states.setdefault(name, SlotState(0, {}, {}))
        if isinstance(about, TensorStorageMetadata) and len(about.size) > 0:
            state.elements[key] = about.properties.dtype
        else:
            state.values[key] = about
    return states


def _place(about: Any) -> Tensor | None:
    """What `dcp.load` fills: a tensor in place, anything else by replacing it."""
    return (
        torch.zeros(about.size, dtype=about.properties.dtype)
        if isinstance(about, TensorStorageMetadata)
        else None
    )


def _saved_groups(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """The checkpoint's parameter groups by number, with nothing filled in.

    Raises:
        ValueError: if there are none.
    """
    groups: dict[str, dict[str, Any]] = {}
    for flat_key, path in metadata.planner_data.items():
        if path[:2] == ("optimizer", "param_groups"):
            _, _, number, option = path
            about = metadata.state_dict_metadata[flat_key]
            groups.setdefault(number, {})[option] = _place(about)
    if not groups:
        raise ValueError("the checkpoint has no optimizer state; save it with save(path, model, optimizer)")
    return groups


def _sharded(master: MasterShard, slot: ParamSlot, shard: Tensor) -> Tensor | ShardedTensor:
    """One parameter's part of `shard`, which is laid out as the master shard; aliases it."""
    ranks, length = master.grid.shard, shard.numel()
    # A checkpoint cuts along dimensions, so there has to be one.
    shape = slot.shape or (1,)
    if ranks.group is None or ranks.size == 1 or slot.numel == 0:
        return shard[slot.offset : slot.end].view(shape)
    everywhere: list[ShardMetadata] = []
    own: list[Shard] = []
    for rank in range(slot.offset // length, -(-slot.end // length)):
        start, stop = (
            min(max(rank_edge - slot.offset, 0), slot.numel)
            for rank_edge in (rank * length, (rank + 1) * length)
        )
        for box in boxes(shape, start, stop):
            place = f"rank:{dist.get_global_rank(ranks.group, rank)}/{master.flat.device}"
            about = ShardMetadata(list(box.offsets), list(box.sizes), place)
            everywhere.append(about)
            if rank == ranks.rank:
                first = slot.offset + box.start - rank * length
                own.append(Shard(shard[first : first + box.numel].view(box.sizes), about))
    properties = TensorProperties(dtype=shard.dtype)
    whole = ShardedTensorMetadata(everywhere, torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, ranks.group)
