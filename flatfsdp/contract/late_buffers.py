"""Late buffers: buffers that a layer makes on first use, such as the scales of delayed scaling.

They are FP32 even if the model is cast, and a checkpoint may have them before the layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flatfsdp.contract.attribute import Attribute


def _missing(shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
    """Stands in for the method in a layer that only names its late buffers.

    Raises:
        TypeError: always.
    """
    raise TypeError("a layer that names late_buffers needs prepare_load(shapes, device), too, to be loaded")


LATE_BUFFERS = Attribute[tuple[str, ...]]("late_buffers", ())
"""Names of the late buffers in the layer."""

PREPARE_LOAD = Attribute[Callable[[Mapping[str, torch.Size], torch.device | None], None]](
    "prepare_load", _missing
)
"""Method of a layer that makes its late buffers, given the shapes in a checkpoint."""
