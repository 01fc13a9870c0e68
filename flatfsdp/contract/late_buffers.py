"""Buffers that a layer gets on first use, such as the scales of delayed scaling.

They are FP32 whatever the model is cast to, and a checkpoint may have them before the layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flatfsdp.contract.attribute import Attribute


def _missing(shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
    """Stands for the method in a layer that has the names alone.

    Raises:
        TypeError: always.
    """
    raise TypeError("a layer that names late_buffers needs prepare_load(shapes, device), too, to be loaded")


LATE_BUFFERS = Attribute[tuple[str, ...]]("late_buffers", ())
"""Their names in the layer."""

PREPARE_LOAD = Attribute[Callable[[Mapping[str, torch.Size], torch.device | None], None]](
    "prepare_load", _missing
)
"""A layer's method, called with the shapes of those that a checkpoint has: makes them."""
