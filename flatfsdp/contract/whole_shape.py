"""Whole shapes of parameters of which a rank has a part.

In:   the parameters that a model sharded in place lists: 1-D, this rank's elements.
Next: code that groups, counts or names parameters by shape calls `whole_shape`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.contract.attribute import Attribute

WHOLE_SHAPE = Attribute[tuple[int, ...] | None]("whole_shape", None)
"""Attribute of this rank's part: the shape of the whole parameter, over tensor-parallel ranks together."""


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter that `parameter` is a part of; its own shape if it is not a part.

    decayed = [p for p in model.parameters() if len(whole_shape(p)) >= 2]
    """
    shape = WHOLE_SHAPE.of(parameter)
    return parameter.shape if shape is None else torch.Size(shape)
