"""A wrapped model whose shards are cut as those of a model that is sharded in place."""

from __future__ import annotations

import torch
from torch import nn

from flatfsdp.engine.storage.local_shards import cut
from flatfsdp.engine.storage.targets import attach_targets
from flatfsdp.engine.whole.units import UnitModule, units_in


def cut_by_hand(model: UnitModule) -> dict[str, nn.Parameter]:
    """From now on the portions of all shards are views; returns them by the names of their parameters."""
    views: dict[str, nn.Parameter] = {}
    for prefix, wrapped in units_in(model):
        for group in wrapped.fsdp_state.groups:
            master = group.master
            shapes = (slot.shape for slot in master.layout.slots)
            originals = [nn.Parameter(torch.empty(shape), requires_grad=group.trains) for shape in shapes]
            master.divide(cut(master, originals))
            attach_targets(group)
            for slot, portion in zip(master.layout.slots, master.portions, strict=True):
                views[prefix + slot.name] = portion.parameter
    return views
