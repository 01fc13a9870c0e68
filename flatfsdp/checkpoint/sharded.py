"""For torch.distributed.checkpoint: every rank writes and reads its own part, as boxes of the whole tensors.

A checkpoint written here holds ordinary tensors under the original names, so any number of ranks, another
engine, or `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` can read it.

    tensor parallel     parts are written at their places in the whole tensor, what all ranks have once
    pipeline            stages are one checkpoint, if layers have the same names in them as in the whole
                        model, such as those of an nn.ModuleDict by the number of the layer
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flatfsdp.checkpoint.boxes import Box, boxes, boxes_of_part
from flatfsdp.checkpoint.local import adopt_late_buffers, persistent_buffers
from flatfsdp.checkpoint.optimizer_state import (
    SlotState,
    described,
    groups_by_name,
    install,
    merged_groups,
    state_shard,
    trained_masters,
)
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import ALONE, Ranks, default_group
from flatfsdp.engine.storage.group import settle
from flatfsdp.engine.storage.master import MasterShard, require_same_ranks
from flatfsdp.engine.units import Model, named_groups, parts_of
from flatfsdp.flat.layout import ParamSlot


def save(path: str | os.PathLike[str], model: Model, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Writes model and optimizer to a folder, each rank its part.  Collective over all ranks.

    Args:
        model: or the stages of a pipeline that this rank has.
        optimizer: over all parameters of `model`.

    Raises:
        ValueError: as `sharded_state_dict`; on all ranks, if two stages have parameters of the same name.
    """
    _check_names(model)
    state: dict[str, Any] = {"model": sharded_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = sharded_optimizer_state_dict(model, optimizer)
        groups = state["optimizer"]["param_groups"]
        of_stages = _of_each_stage([groups[number] for number in sorted(groups, key=int)], model)
        state["optimizer"]["param_groups"] = _numbered(merged_groups(of_stages))
    dcp.save(state, checkpoint_id=path)


def load(path: str | os.PathLike[str], model: Model, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Reads what `save` has written, with any number of ranks of each kind.  Collective over all ranks.

    Args:
        model: or the stages of a pipeline that this rank has.
        optimizer: over all parameters of `model`.

    Raises:
        ValueError: if the checkpoint has no optimizer state, or one that does not fit; on all ranks, if two
            stages have parameters of the same name.
        torch.distributed.checkpoint.CheckpointException: if something is missing or has another shape.
    """
    names = _check_names(model)
    metadata = dcp.FileSystemReader(path).read_metadata()
    if optimizer is not None:
        _load_optimizer(path, metadata, model, optimizer, names)
    saved = _saved_shapes(metadata)
    absent = {name for part in parts_of(model) for name in adopt_late_buffers(part, saved)}
    state = {key: value for key, value in sharded_state_dict(model).items() if key not in absent}
    dcp.load({"model": state}, checkpoint_id=path)
    for _, group in named_groups(model):
        group.master.generation += 1


def _of_each_stage(value: Any, model: Model) -> list[Any]:
    """What the first rank of each stage passes, which has to be picklable.  Collective over all ranks."""
    master = named_groups(model)[0][1].master
    world = Ranks.of(default_group())
    everyones = all_gather_object([value] if master.grid.is_first else [], world, master.device)
    return [each for of_rank in everyones for each in of_rank]


def _check_names(model: Model) -> set[str]:
    """The names of all parameters of all stages.  Collective over all ranks.

    Raises:
        ValueError: if two stages have one name; one of the two would be lost.
    """
    groups = named_groups(model)
    require_same_ranks((group.master for _, group in groups), "a sharded checkpoint")
    own = [prefix + slot.name for prefix, group in groups for slot in group.layout.slots]
    names = Counter(name for of_stage in _of_each_stage(own, model) for name in of_stage)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"two stages have a parameter {twice[0]!r}; give layers the same names as in the whole model, "
            "such as keys of an nn.ModuleDict by the number of the layer"
        )
    return set(names)


def _saved_shapes(metadata: Metadata) -> dict[str, torch.Size]:
    return {
        metadata.planner_data[key][1]: about.size
        for key, about in metadata.state_dict_metadata.items()
        if metadata.planner_data[key][0] == "model" and isinstance(about, TensorStorageMetadata)
    }


def sharded_state_dict(model: Model) -> dict[str, Any]:
    """Parameters as ShardedTensors (plain ones if not sharded) and buffers, for `dcp.save` and `dcp.load`.

    They alias the master shards, so `dcp.load` loads in place.  A tied parameter has its first name.  For
    `dcp.async_save` pass `async_stager=BlockingAsyncStager()` and a gloo process group of its own.  What
    a module's `get_extra_state` returns is not in it.  Collective, if the model is tensor-parallel.

    Args:
        model: or the stages of a pipeline that this rank has; layers have the names of the whole model.

    Raises:
        ValueError: if some units are spread over fewer ranks than others.
    """
    groups = named_groups(model)
    require_same_ranks((group.master for _, group in groups), "a sharded checkpoint")
    for _, group in groups:
        # A load in place may reach the shards of some ranks only; all of them cast and gather anew.
        group.master.generation += 1
    settle(group for _, group in groups)
    owners = _owners(group.master for _, group in groups)
    parameters = {
        prefix + slot.name: _sharded(group.master, slot, group.master.flat.detach(), owners)
        for prefix, group in groups
        for slot in group.layout.slots
    }
    buffers = (named for part in parts_of(model) for named in persistent_buffers(part))
    return {**parameters, **dict(buffers)}


def sharded_optimizer_state_dict(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `full_optimizer_state_dict`, with ShardedTensors, and parameter groups by number.  Collective.

    The parameter groups are those of this rank's stages; `save` joins those of all.

    Raises:
        ValueError: as `sharded_state_dict`, or if the optimizer is not over this model's shards.
        TypeError: as `full_optimizer_state_dict`.
    """
    masters = trained_masters(model, optimizer)
    require_same_ranks((master for _, master in masters), "a sharded checkpoint")
    states, owners = described(masters, optimizer).states, _owners(master for _, master in masters)
    state: dict[str, dict[str, Any]] = {name: dict(slot.values) for name, slot in states.items()}
    for prefix, master in masters:
        shards: dict[str, Tensor] = {}
        for slot in master.layout.slots:
            described_slot = states.get(prefix + slot.name)
            for key, dtype in described_slot.elements.items() if described_slot else ():
                if key not in shards:
                    shards[key] = state_shard(master, optimizer, key, dtype)
                state[prefix + slot.name][key] = _sharded(master, slot, shards[key], owners)
    return {"state": state, "param_groups": _numbered(groups_by_name(optimizer, states))}


def _numbered(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A dict, because torch.distributed.checkpoint takes some lists apart and others not."""
    return {str(index): group for index, group in enumerate(groups)}


def _load_optimizer(
    path: str | os.PathLike[str],
    metadata: Metadata,
    model: Model,
    optimizer: torch.optim.Optimizer,
    names: set[str],
) -> None:
    """
    Args:
        names: of the parameters of all stages.
    """
    masters = trained_masters(model, optimizer)
    owners = _owners(master for _, master in masters)
    own = {prefix + slot.name for prefix, master in masters for slot in master.layout.slots}
    # Other stages take theirs; what is of no stage is an error.
    states = {n: state for n, state in _saved_states(metadata).items() if n in own or n not in names}
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
                target["state"][name][key] = _sharded(master, slot, shard, owners)
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
        torch.zeros(about.size, dtype=about.properties.dtype, device="cpu")
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


Owners = Mapping[Grid, Sequence[Sequence[int]]]
"""Of each grid: the global ranks that have a parameter, by tensor-parallel rank and shard."""


def _owners(masters: Iterable[MasterShard]) -> Owners:
    """Collective over tensor-parallel ranks."""
    own_rank = Ranks.of(default_group()).rank
    devices = {master.grid: master.device for master in masters}
    return {
        grid: all_gather_object(grid.shard.global_ranks or [own_rank], grid.tensor, device)
        for grid, device in devices.items()
    }


def _sharded(master: MasterShard, slot: ParamSlot, shard: Tensor, owners: Owners) -> Tensor | ShardedTensor:
    """One parameter's part of `shard`, which is laid out as the master shard; aliases it."""
    grid, length = master.grid, shard.numel()
    # A checkpoint cuts along dimensions, so there has to be one.
    shape = slot.whole_shape or (1,)
    tensor = ALONE if slot.partition is None else grid.tensor
    if grid.shard.size * tensor.size == 1 or slot.numel == 0:
        return shard[slot.offset : slot.end].view(shape)
    everywhere: list[ShardMetadata] = []
    own: list[Shard] = []
    of_tensor_ranks = owners[grid] if tensor.size > 1 else [owners[grid][grid.tensor.rank]]
    for tensor_rank, ranks in enumerate(of_tensor_ranks):
        for rank in range(slot.offset // length, -(-slot.end // length)):
            is_own = (tensor_rank, rank) == (tensor.rank, grid.shard.rank)
            for box in _boxes(slot, rank * length, (rank + 1) * length, tensor_rank, tensor.size):
                place = f"rank:{ranks[rank]}/{master.flat.device}"
                about = ShardMetadata(list(box.offsets), list(box.sizes), place)
                everywhere.append(about)
                if is_own:
                    first = slot.offset + box.start - rank * length
                    own.append(Shard(shard[first : first + box.numel].view(box.sizes), about))
    properties = TensorProperties(dtype=shard.dtype)
    whole = ShardedTensorMetadata(everywhere, torch.Size(shape), properties)
    # Several tensor-parallel ranks and shards have no group of their own; this one is not used for anything.
    group = dist.group.WORLD if tensor.size > 1 else grid.shard.group
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, group)


def _boxes(slot: ParamSlot, low: int, high: int, tensor_rank: int, tensor_size: int) -> Iterator[Box]:
    """What elements [low, high) of a tensor-parallel rank's flat buffer hold of a slot, where they are in the
    whole tensor."""
    start, stop = (min(max(edge - slot.offset, 0), slot.numel) for edge in (low, high))
    if slot.partition is None:
        return boxes(slot.shape or (1,), start, stop)
    return boxes_of_part(slot.shape, start, stop, slot.partition, tensor_rank, tensor_size)
