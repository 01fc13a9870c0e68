"""Views: the parameters that a model sharded in place lists, one for each original parameter.

In:   the master shard of one flat group, and the parameters that it was filled from.
Out:  portions of the shard, whose parameters are 1-D views of it and keep the users' own attributes.
Next: `flat/binding.py` lists them in the modules, optimizers update them, gradients are published to them.

    shard   | slot 0 .......|gap| slot 1 ....................|
    views     [0, 13)             [16, 48)                       slot 2: [48, 48), on the next rank

An empty view stands where its parameter would be, so starts ascend in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flatfsdp.contract import claimed, flat_shard, main_grad, operand, whole_shape
from flatfsdp.contract.attribute import Attribute
from flatfsdp.engine.storage.master import MasterShard, Portion

_OF_ONE_TENSOR = {
    each.name
    for contract in (claimed, flat_shard, main_grad, operand, whole_shape)
    for each in vars(contract).values()
    if isinstance(each, Attribute)
}
"""Attributes that the engine and layers set on one tensor, and that do not hold for its replacement."""


def cut(master: MasterShard, originals: Iterable[nn.Parameter]) -> list[Portion]:
    """One portion of the shard for each slot of its layout, in their order.

    Each is a parameter in the shard's memory that shares its version counter: 1-D, in the master's dtype,
    empty if the slot lies on other ranks.  It has the original's `requires_grad`, the original's own
    attributes, and its whole shape (`whole_shape`).

    Args:
        originals: the parameters of the slots, in their order.
    """
    portions = []
    for slot, original in zip(master.layout.slots, originals, strict=True):
        portion = portion_of(master, slot.offset, slot.end, trains=original.requires_grad)
        # Tensor-parallel marks are kept, too: other libraries read them from what the optimizer has.
        users_own = {name: each for name, each in vars(original).items() if name not in _OF_ONE_TENSOR}
        vars(portion.parameter).update(users_own)
        whole_shape.WHOLE_SHAPE.leave(portion.parameter, slot.whole_shape)
        portions.append(portion)
    return portions


def portion_of(master: MasterShard, offset: int, end: int, *, trains: bool = True) -> Portion:
    """This rank's part of elements [offset, end) of the whole buffer: a parameter in the shard's memory."""
    length = master.flat.numel()
    first = master.grid.shard.rank * length
    start, stop = (min(max(edge - first, 0), length) for edge in (offset, end))
    # A slice of a detached tensor shares the version counter, so an update of the parameter is noticed.
    return Portion(nn.Parameter(master.flat.detach()[start:stop], trains), start, stop)
