"""Stores an `EMA` in a sharded checkpoint beside the model, under the same names, for any number of ranks.

In:   an average of a model's weights.
Out:  the entries that `saving.py` writes; the average's shards, filled with what `loading.py` has read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.sharded import owners_of, sharded_slot


def sharded_average(ema: EMA, shards: list[Tensor]) -> dict[str, Any]:
    """Checkpoint entries of an average.  Collective, if the model is tensor-parallel.

    Args:
        ema: the average.
        shards: shards in the layout of the average's; the entries alias them.
    """
    owners = owners_of(group.master for _, group in ema.groups)
    values = {
        prefix + slot.name: sharded_slot(group.master, slot, shard, owners)
        for (prefix, group), shard in zip(ema.groups, shards, strict=True)
        for slot in group.layout.slots
    }
    return {"values": values, "updates": ema.updates}


def check_average_fits(metadata: Metadata, ema: EMA) -> None:
    """Compares names, shapes and dtypes.

    Raises:
        ValueError: if the checkpoint has no average, or one of other weights.
    """
    saved = {
        ".".join(map(str, path[2:])): metadata.state_dict_metadata[flat_name]
        for flat_name, path in (metadata.planner_data or {}).items()
        if path[:2] == ("ema", "values")
    }
    if not saved:
        raise ValueError("the checkpoint has no average; save it with save(path, model, optimizer, ema=ema)")
    own = {
        prefix + slot.name: (torch.Size(slot.whole_shape or (1,)), shard.dtype)
        for (prefix, group), shard in zip(ema.groups, ema.shards, strict=True)
        for slot in group.layout.slots
    }
    for name, expected in own.items():
        about = saved.get(name)
        found = (about.size, about.properties.dtype) if isinstance(about, TensorStorageMetadata) else None
        if found != expected:
            raise ValueError(
                f"the checkpoint's average is not of these weights: of {name} it has {found}, here {expected}"
            )


def fill_average(ema: EMA, shards: list[Tensor], updates: int) -> None:
    """Copies the shards that were read, and the number of updates, into the average."""
    for own, read in zip(ema.shards, shards, strict=True):
        own.copy_(read)
    ema.updates = updates
