"""Python objects from one rank to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import declare
from flatfsdp.comm.device import on_device
from flatfsdp.comm.ranks import Ranks


def broadcast_object(value: Any, dimensions: Sequence[Ranks], device: torch.device) -> Any:
    """What the first rank of a grid of these dimensions passes, which has to be picklable.  Collective."""
    box = [value]
    with on_device(device):
        # Along the first rank's line, then from each rank of that.
        for ranks in dimensions:
            if ranks.size > 1:
                _declare(ranks, device)
                dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]


def all_gather_object(value: Any, ranks: Ranks, device: torch.device) -> list[Any]:
    """What each rank passes, which has to be picklable, in rank order.  Collective."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    with on_device(device):
        _declare(ranks, device)
        dist.all_gather_object(found, value, group=ranks.group)
    return found


def _declare(ranks: Ranks, device: torch.device) -> None:
    """Says what comes; a model on the CPU may be on ranks whose group has NCCL alone, for devices."""
    assert ranks.group is not None
    if torch.device(device.type) in ranks.group._device_types:
        declare(ranks, Identity(Action.OBJECTS), device)
