"""`PackedSlot`: neighbouring slots of a flat layout that one GEMM reads as one operand.

In:   the slots of a layout, and the parameters that should be one operand.
Out:  the runs of slots without a gap between them; pure arithmetic.
Next: `layout.py` stores them, `engine/storage/` makes one tensor of each.

    flat     | q_proj.weight | k_proj.weight | v_proj.weight |gap| o_proj.weight |
    packs   |<---------------- qkv_weight ----------------->|

Each parameter still has its own slot: shards, checkpoints and optimizers do not see packs.  A shard boundary
may cut a pack anywhere, because packs exist in unsharded buffers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

Shape = tuple[int, ...]


class Placed(Protocol):
    """Interface of a slot, as far as a pack needs it."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""

    @property
    def offset(self) -> int:
        """First element in the flat buffer."""

    @property
    def end(self) -> int:
        """End of the slot in the flat buffer."""


@dataclass(frozen=True)
class PackedSlot:
    """Slots [first, last) of a layout as one operand.

    Attributes:
        name: name that its first owner gives it, such as "layers.0.self_attn.qkv_weight".
        shape: [sum of rows, columns], or [sum of elements] for biases.
        offset: first element in the flat buffer.
    """

    name: str
    first: int
    last: int
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements in the pack."""
        return math.prod(self.shape)

    @property
    def slots(self) -> range:
        """Indices of the slots."""
        return range(self.first, self.last)


def why_not_pack(shapes: Sequence[Shape], alignment: int) -> str | None:
    """Checks whether parameters of these shapes, packed one after the other, form one operand.

    Args:
        shapes: shapes of the parameters, in order.
        alignment: alignment of slots, in elements.

    Returns:
        None if they do; otherwise the reason why not.
    """
    if any(not shape for shape in shapes):
        return "one is a scalar"
    if len({shape[1:] for shape in shapes}) > 1:
        return "they have rows of different shapes"
    if any(math.prod(shape) % alignment for shape in shapes[:-1]):
        return f"one has a number of elements that is no multiple of {alignment}"
    return None


def find_pack(name: str, parts: Sequence[str], slots: Sequence[Placed]) -> PackedSlot | None:
    """Makes the pack of the slots with these names; None if there are gaps between them."""
    first = next((index for index, slot in enumerate(slots) if slot.name == parts[0]), len(slots))
    last = first + len(parts)
    members = slots[first:last]
    if [slot.name for slot in members] != list(parts) or why_not_pack([slot.shape for slot in members], 1):
        return None
    if any(before.end != after.offset for before, after in pairwise(members)):
        return None
    rows = sum(slot.shape[0] for slot in members)
    return PackedSlot(name, first, last, (rows, *members[0].shape[1:]), members[0].offset)


def runs_of(num_slots: int, packs: Sequence[PackedSlot]) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last) of slots that are one operand, in order: packs, and slots by themselves."""
    last_of = {pack.first: pack.last for pack in packs}
    runs, cursor = [], 0
    while cursor < num_slots:
        runs.append((cursor, last_of.get(cursor, cursor + 1)))
        cursor = runs[-1][1]
    return tuple(runs)
