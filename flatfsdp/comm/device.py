"""Devices: adding a device's index, and making one current for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def indexed(device: torch.device) -> torch.device:
    """Returns the device with its index, by default that of the current device; the CPU has none."""
    if device.type == "cpu":
        # Accelerate says "cpu:0", but tensors made there say "cpu".
        return torch.device("cpu")
    is_open = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_open else device


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current: collectives of Python objects travel through the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
