"""Local shards: the parameters that an optimizer has of one master shard.

In:   a master shard, and the parameters that it was filled from.
Out:  parameters in its memory, one a slot: 1-D views, which keep what a user has set on the originals.
Next: `flat/binding.py` lists them in the modules, optimizers update them, gradients are published to them.

    master shard    | slot 0 .......|gap| slot 1 ....................|
    local shards      [0, 13)             [16, 48)                       slot 2: [48, 48), on the next rank

An empty one stands where its parameter would be, so starts ascend in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from flatfsdp.contract import claimed, flat_shard, main_grad, operand, whole_shape
from flatfsdp.contract.attribute import Attribute
from flatfsdp.flat.layout import FlatLayout

_OF_ONE_TENSOR = {
    each.name
    for contract in (claimed, flat_shard, main_grad, operand, whole_shape)
    for each in vars(contract).values()
    if isinstance(each, Attribute)
}
"""Attributes that the engine and layers set on one tensor, and that do not hold for its replacement."""


class Portion(NamedTuple):
    """Elements [start, stop) of a master shard, and the parameter that aliases them for the optimizer."""

    parameter: nn.Parameter
    start: int
    stop: int


def cut(
    flat: nn.Parameter, layout: FlatLayout, rank: int, originals: Sequence[nn.Parameter]
) -> list[Portion]:
    """One portion of a master shard for each slot of its layout, in their order.

    Each is a parameter in the shard's memory that shares its version counter: 1-D, in the master's dtype,
    empty if the slot lies on other ranks.  It has the original's `requires_grad`, the original's own
    attributes, and its whole shape (`whole_shape`).

    Args:
        flat: the master shard, 1-D.
        layout: places of the slots in the whole buffer.
        rank: number of the shard in the whole buffer.
        originals: the parameters of the slots, in their order.
    """
    portions, length = [], flat.numel()
    for slot, original in zip(layout.slots, originals, strict=True):
        start, stop = (min(max(edge - rank * length, 0), length) for edge in (slot.offset, slot.end))
        # A slice of a detached tensor shares the version counter, so an update of the parameter is noticed.
        parameter = nn.Parameter(flat.detach()[start:stop], original.requires_grad)
        # Tensor-parallel marks are kept, too: other libraries read them from what the optimizer has.
        users_own = {name: each for name, each in vars(original).items() if name not in _OF_ONE_TENSOR}
        vars(parameter).update(users_own)
        whole_shape.WHOLE_SHAPE.leave(parameter, slot.whole_shape)
        portions.append(Portion(parameter, start, stop))
    return portions
