"""Devices: one with its number, and one that is the current one for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def indexed(device: torch.device) -> torch.device:
    """The device with its number: without one, the current one is meant.  The CPU has none."""
    if device.type == "cpu":
        # Accelerate says "cpu:0", and tensors that are made there say "cpu".
        return torch.device("cpu")
    is_open = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_open else device


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the current one: collectives of Python objects travel through that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
