"""The shape of the parameter that a rank has a part of.

In:   what `parameters()` of a model lists that is sharded in place: 1-D, this rank's elements.
Next: whoever groups, counts or names parameters by their shape asks `whole_shape`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.contract.attribute import Attribute

WHOLE_SHAPE = Attribute[tuple[int, ...] | None]("whole_shape", None)
"""Left on this rank's part of one parameter: the parameter's shape, over tensor-parallel ranks together."""


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the parameter of which `parameter` is this rank's part; its own shape if it is no part.

    decayed = [p for p in model.parameters() if len(flatfsdp.whole_shape(p)) >= 2]
    """
    shape = WHOLE_SHAPE.of(parameter)
    return parameter.shape if shape is None else torch.Size(shape)
