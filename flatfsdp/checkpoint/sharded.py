"""State dicts for torch.distributed.checkpoint: each rank's own part, as boxes of the whole tensors.

In:   a model and its optimizer.
Out:  state dicts of ShardedTensors that alias the shards.
Next: `saving.py` writes them, `loading.py` fills them.

A checkpoint written here holds ordinary tensors under the original names, so any number of ranks, another
engine, or `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` can read it.

    tensor parallel     parts are written at their places in the whole tensor; what all ranks have, once
    pipeline            stages form one checkpoint, if their layers have the names of the whole model, such as
                        those of an nn.ModuleDict by the number of the layer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from flatfsdp.checkpoint.boxes import boxes_of_part
from flatfsdp.checkpoint.local import persistent_buffers
from flatfsdp.checkpoint.optimizer_state import (
    described,
    groups_by_name,
    state_of_local_shard,
    trained_masters,
)
from flatfsdp.comm.grid import Grid, require_same_ranks
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import ALONE, Ranks, default_group
from flatfsdp.engine.storage.group import settle
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import Model, named_groups, stages_of
from flatfsdp.flat.layout import ParamSlot


def sharded_state_dict(model: Model) -> dict[str, Any]:
    """Parameters as ShardedTensors (plain ones if not sharded) and buffers, for `dcp.save` and `dcp.load`.

    They alias the master shards, so `dcp.load` loads in place.  A tied parameter has its first name.  Extra
    state of modules is not included.  Collective, if the model is tensor-parallel.

    Args:
        model: the model, or this rank's stages of a pipeline; layers have the names of the whole model.

    Raises:
        ValueError: if some units are spread over fewer ranks than others.
    """
    groups = named_groups(model)
    require_same_ranks((group.grid for _, group in groups), "a sharded checkpoint")
    for _, group in groups:
        # A load in place may write to some ranks' shards only; yet all ranks must cast and gather again.
        group.master.count_load()
    settle(group for _, group in groups)
    masters = [(prefix, group.master) for prefix, group in groups]
    parameters = sharded_slots(masters, [master.flat.detach() for _, master in masters])
    buffers = (named for stage in stages_of(model) for named in persistent_buffers(stage))
    return {**parameters, **dict(buffers)}


def sharded_optimizer_state_dict(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as ShardedTensors, and its parameter groups by number.  Collective.

    The parameter groups are those of this rank's stages; `sharded_training_state` joins those of all.  The
    dict also names the optimizer's class.

    Raises:
        ValueError: if some units are spread over fewer ranks than others, or the optimizer is not over this
            model's shards.
        TypeError: if the optimizer has states that are neither one number nor as large as the parameter.
    """
    masters = trained_masters(model, optimizer)
    require_same_ranks((master.grid for _, master in masters), "a sharded checkpoint")
    states, owners = described(masters, optimizer).states, owners_of(master for _, master in masters)
    state: dict[str, dict[str, Any]] = {name: dict(slot.values) for name, slot in states.items()}
    for prefix, master in masters:
        for slot, local_shard in zip(master.layout.slots, master.per_slot(master.local_shards), strict=True):
            name = prefix + slot.name
            for key, dtype in states[name].elements.items() if name in states else ():
                own = state_of_local_shard(local_shard, optimizer, key, dtype)
                state[name][key] = sharded_slot(master, slot, own, owners, local_shard.start)
    return {
        "state": state,
        "param_groups": numbered(groups_by_name(optimizer, states)),
        "class": type(optimizer).__name__,
    }


def numbered(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Makes a dict of the groups: torch.distributed.checkpoint takes some lists apart and not others."""
    return {str(index): group for index, group in enumerate(groups)}


def sharded_slots(
    masters: Sequence[tuple[str, MasterShard]], shards: Sequence[Tensor]
) -> dict[str, Tensor | ShardedTensor]:
    """The parameters of master shards by name, with values of `shards`, one a master shard, which they alias.

    Collective, if the model is tensor-parallel.
    """
    owners = owners_of(master for _, master in masters)
    return {
        prefix + slot.name: sharded_slot(master, slot, shard, owners)
        for (prefix, master), shard in zip(masters, shards, strict=True)
        for slot in master.layout.slots
    }


Owners = Mapping[Grid, Sequence[Sequence[int]]]
"""Global ranks that have a parameter, by grid, tensor-parallel rank and shard."""


def owners_of(masters: Iterable[MasterShard]) -> Owners:
    """The global ranks that have each shard.  Collective over tensor-parallel ranks."""
    own_rank = Ranks.of(default_group()).rank
    devices = {master.grid: master.device for master in masters}
    return {
        grid: all_gather_object(grid.shard.global_ranks or [own_rank], grid.tensor, device)
        for grid, device in devices.items()
    }


def sharded_slot(
    master: MasterShard, slot: ParamSlot, shard: Tensor, owners: Owners, first: int = 0
) -> Tensor | ShardedTensor:
    """One parameter's part of `shard`, which has the master shard's layout from element `first` on.

    The result aliases `shard`.
    """
    grid, length = master.grid, master.flat.numel()
    # A checkpoint cuts along dimensions, so there must be one.
    shape, shape_of_part = slot.whole_shape or (1,), slot.shape or (1,)
    tensor = ALONE if slot.partition is None else grid.tensor
    if grid.shard.size * tensor.size == 1 or slot.numel == 0:
        return shard[slot.offset - first : slot.end - first].view(shape)
    everywhere: list[ShardMetadata] = []
    own: list[Shard] = []
    of_tensor_ranks = owners[grid] if tensor.size > 1 else [owners[grid][grid.tensor.rank]]
    for tensor_rank, ranks in enumerate(of_tensor_ranks):
        for rank in range(slot.offset // length, -(-slot.end // length)):
            is_own = (tensor_rank, rank) == (tensor.rank, grid.shard.rank)
            low, high = (edge * length - slot.offset for edge in (rank, rank + 1))
            start, stop = max(low, 0), min(high, slot.numel)
            for box in boxes_of_part(shape_of_part, start, stop, slot.partition, tensor_rank, tensor.size):
                place = f"rank:{ranks[rank]}/{master.flat.device}"
                about = ShardMetadata(list(box.offsets), list(box.sizes), place)
                everywhere.append(about)
                if is_own:
                    begin = box.start - low - first
                    own.append(Shard(shard[begin : begin + box.numel].view(box.sizes), about))
    properties = TensorProperties(dtype=shard.dtype)
    whole = ShardedTensorMetadata(everywhere, torch.Size(shape), properties)
    # Tensor-parallel ranks and shards together have no group of their own; this one is not used for anything.
    group = dist.group.WORLD if tensor.size > 1 else grid.shard.group
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, group)
