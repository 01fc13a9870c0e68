"""Buffers that a layer gets on first use, such as the scales of delayed scaling.

They are FP32 whatever the model is cast to, and a checkpoint may have them before the layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flatfsdp.contract.attribute import Attribute


def _nothing_to_prepare(shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
    """For layers without such buffers."""


LATE_BUFFERS = Attribute[tuple[str, ...]]("late_buffers", ())
"""Their names in the layer."""

PREPARE_LOAD = Attribute[Callable[[Mapping[str, torch.Size], torch.device | None], None]](
    "prepare_load", _nothing_to_prepare
)
"""A layer's method, called with the shapes of those that a checkpoint has: makes them."""
