"""The environment of a measurement, for reports."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp.comm.launch import Rank


def environment(rank: Rank) -> dict[str, Any]:
    """Versions, device and ranks; collective over all ranks."""
    cuda = rank.device.type == "cuda"
    gpus: list[str | None] = [None] * rank.world
    if cuda:
        dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(rank.device).uuid))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(rank.device) if cuda else f"CPU ({platform.machine()})",
        "backend": dist.get_backend(),
        "world_size": rank.world,
        "gpus": len(set(gpus) - {None}),  # ranks of several hosts may be emulated on one, and share its GPUs
    }
