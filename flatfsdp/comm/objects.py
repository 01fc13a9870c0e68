"""Collectives of Python objects."""

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
    """Returns the picklable value of the first rank in a grid of these dimensions.  Collective."""
    box = [value]
    with on_device(device):
        # Along the first rank's line, then from each rank of that line.
        for ranks in dimensions:
            if ranks.size > 1:
                _declare(ranks, device)
                dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]


def all_gather_object(value: Any, ranks: Ranks, device: torch.device) -> list[Any]:
    """Returns every rank's picklable value, in rank order.  Collective."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    with on_device(device):
        _declare(ranks, device)
        dist.all_gather_object(found, value, group=ranks.group)
    return found


def _declare(ranks: Ranks, device: torch.device) -> None:
    """Declares the coming exchange; ranks of a CPU model may have a group with NCCL alone, for devices."""
    assert ranks.group is not None
    if torch.device(device.type) in ranks.group._device_types:
        declare(ranks, Identity(Action.OBJECTS), device)
