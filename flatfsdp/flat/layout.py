"""`FlatLayout`: the place of each parameter in a flat buffer, as pure arithmetic.

In:   the names and shapes of the parameters of one group (`FlatLayout.pack`).
Out:  a frozen `FlatLayout` of `ParamSlot`s, the same on every rank.
Next: `engine/storage/` makes buffers of these sizes, `binding.py` ties the slots to a module.

    flat   | slot 0 ........|gap| slot 1 ...........................|gap| slot 2 .....| tail |
    shards |<---- shard_numel(n) ---->|<---- shard_numel(n) ---->|<---- shard_numel(n) ---->|

Offsets do not depend on the number of ranks; only the tail does.  So M ranks can read a checkpoint that N
ranks wrote, by cutting the same line elsewhere.  With `cuts` not even the tail does: shards then are whole
numbers of that many equal parts, for every number of ranks that divides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from flatfsdp.contract.placement import Partition, Placement
from flatfsdp.flat.pack_candidates import PackedSlot, why_not_pack

ELEMENT_ALIGNMENT = 16
"""Every slot and every shard starts on a multiple of this many elements.  Even at one byte an element these
are 16 bytes, as vector loads, TMA and FP8 GEMMs require."""


class Role(Enum):
    """Storage of the unsharded copy of a slot."""

    COMPUTE = "compute"
    """Stored in the unit's compute dtype."""
    FP8 = "fp8"
    """Stored in E4M3, one byte an element, with one scale for the slot."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter to be packed, before it has a place.

    Attributes:
        shape: shape of the parameter, or of this tensor-parallel rank's part if it is split.
        partition: split over tensor-parallel ranks; None if it is not split.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.COMPUTE
    placement: Placement = Placement.EQUAL
    partition: Partition | None = None


@dataclass(frozen=True)
class ParamSlot(ParamSpec):
    """The place of one parameter in a flat buffer; `offset` and `numel` are in elements.

    Attributes:
        offset: start of the slot in the flat buffer; the other attributes are those of `ParamSpec`.
    """

    offset: int = 0

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """End of the slot in the flat buffer, in elements."""
        return self.offset + self.numel

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape over all tensor-parallel ranks together."""
        return self.shape if self.partition is None else self.partition.whole_shape(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of a slot that one shard holds: slot elements [start, stop) at `shard_offset` in the shard."""

    slot: ParamSlot
    start: int
    stop: int
    shard_offset: int

    @property
    def shard_stop(self) -> int:
        """End of the piece in the shard."""
        return self.shard_offset + self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one flat buffer in address order.  Build it with `pack`.

    Attributes:
        slots: the slots, disjoint, in address order, each at a multiple of `ELEMENT_ALIGNMENT`.
        numel: unpadded length: end of the last slot, in elements.
        packs: the packs, disjoint, in address order.
        cuts: number of equal parts that shards are made of.
    """

    slots: tuple[ParamSlot, ...]
    numel: int
    packs: tuple[PackedSlot, ...] = ()
    cuts: int = 1

    def described(self, trains: Sequence[bool], *, with_placement: bool) -> Iterator[str]:
        """Describes the geometry, one line a slot or pack, equal on all ranks if the model is sound.

        Args:
            trains: for each slot, whether its parameter is trained.
            with_placement: whether there are tensor-parallel ranks.
        """
        for slot, is_trained in zip(self.slots, trains, strict=True):
            kind = "trained" if is_trained else "frozen"
            role = "" if slot.role is Role.COMPUTE else f" in {slot.role.value}"
            place = f"{list(slot.shape)} at {slot.offset}{role}"
            if with_placement:
                place += f", {slot.placement.value}"
            if slot.partition is not None:
                place += f" from {list(slot.whole_shape)} in {slot.partition.sizes}"
            yield f"{kind} {slot.name} {place}"
        for pack in self.packs:
            parts = " + ".join(slot.name for slot in self.slots[pack.first : pack.last])
            yield f"one operand {pack.name} {list(pack.shape)} of {parts}"

    @staticmethod
    def pack(
        specs: Iterable[ParamSpec], packs: Iterable[tuple[str, Sequence[str]]] = (), cuts: int = 1
    ) -> FlatLayout:
        """Packs the parameters one after the other in the given order.

        Args:
            specs: the parameters, in order.
            packs: name and parameters of each wanted pack; a pack with gaps between its parameters is left
                out.
            cuts: number of equal parts that shards are made of.

        Raises:
            ValueError: if two parameters share a name, or differ in their role.
        """
        slots: list[ParamSlot] = []
        names: set[str] = set()
        cursor = 0
        for spec in specs:
            if spec.name in names:
                raise ValueError(f"two parameters are called {spec.name!r}; their names must differ")
            names.add(spec.name)
            # A buffer has one dtype.
            if slots and spec.role is not slots[0].role:
                raise ValueError(
                    f"{spec.name!r} and {slots[0].name!r} have different roles; pack them into two layouts"
                )
            # Independent of the number of ranks, so that other numbers of ranks can read a checkpoint.
            offset = _round_up(cursor, ELEMENT_ALIGNMENT)
            slots.append(ParamSlot(**{**vars(spec), "shape": tuple(spec.shape)}, offset=offset))
            cursor = slots[-1].end
        found = [_find_pack(name, parts, slots) for name, parts in packs]
        # They were found in the order of their layers, which need not be that of the parameters.
        in_order = sorted((each for each in found if each is not None), key=lambda each: each.first)
        return FlatLayout(tuple(slots), cursor, tuple(in_order), cuts)

    @cached_property
    def _cuts(self) -> list[int]:
        """Lengths of gaps and slots in turn, a gap first."""
        lengths, cursor = [], 0
        for slot in self.slots:
            lengths += [slot.offset - cursor, slot.numel]
            cursor = slot.end
        return lengths

    @cached_property
    def runs(self) -> tuple[PackedSlot, ...]:
        """What GEMMs read as one operand, in order: packs, and slots by themselves."""
        packed = {slot for pack in self.packs for slot in pack.slots}
        singles = [
            PackedSlot(slot.name, index, index + 1, slot.shape, slot.offset)
            for index, slot in enumerate(self.slots)
            if index not in packed
        ]
        return tuple(sorted([*self.packs, *singles], key=lambda run: run.first))

    @property
    def role(self) -> Role:
        """Role of all slots: each buffer has a single one."""
        return self.slots[0].role

    @property
    def placement(self) -> Placement:
        """Placement of all slots, if FlatFSDP has packed them."""
        return self.slots[0].placement

    def shard_numel(self, num_shards: int) -> int:
        """Length of each of `num_shards` equal shards, in elements."""
        parts = math.lcm(self.cuts, num_shards)
        # Shards start at aligned addresses, too, because each is read and sent by itself.
        return _round_up(-(-self.numel // parts), ELEMENT_ALIGNMENT) * (parts // num_shards)

    def padded_numel(self, num_shards: int) -> int:
        """Length of the buffer in elements, padded to a multiple of `num_shards`."""
        return self.shard_numel(num_shards) * num_shards

    def pieces(self, rank: int, num_shards: int) -> list[Piece]:
        """Pieces of slots in shard `rank` of `num_shards`, in address order; empty if it is all padding."""
        pieces = (self.piece(slot, rank, num_shards) for slot in self.slots)
        return [piece for piece in pieces if piece is not None]

    def piece(self, slot: ParamSlot, rank: int, num_shards: int) -> Piece | None:
        """Piece of this slot in shard `rank` of `num_shards`; None if the shard has none of it."""
        length = self.shard_numel(num_shards)
        # A shard may begin or end inside a slot.
        low = rank * length
        start, stop = max(low, slot.offset), min(low + length, slot.end)
        return Piece(slot, start - slot.offset, stop - slot.offset, start - low) if start < stop else None

    def gaps(self, num_shards: int) -> list[tuple[int, int]]:
        """Ranges [start, stop) of the padded buffer outside all slots, in address order."""
        # Ends and starts in turn: where a slot ends, the gap before the next one begins; the last gap is the
        # tail.
        inside = [edge for slot in self.slots for edge in (slot.offset, slot.end)]
        edges = [0, *inside, self.padded_numel(num_shards)]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]

    @cached_property
    def bounds_of_slots(self) -> list[list[tuple[int, int]]]:
        """For each slot, the ranges [start, stop) of the buffer that it has in the equal parts, in order.

        A slot without elements has one range without elements.
        """
        part = self.shard_numel(self.cuts)
        return [
            [
                (max(low, slot.offset), min(low + part, slot.end))
                for low in range(slot.offset // part * part, slot.end, part)
            ]
            if slot.numel
            else [(slot.offset, slot.end)]
            for slot in self.slots
        ]

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The same ranges of all slots, one after the other."""
        return [each for of_slot in self.bounds_of_slots for each in of_slot]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat`, one a slot, in the slots' shapes.

        Differentiable if `flat` is: one split over the whole buffer, whose backward is the one concat
        that `optimize_backward_concat` avoids.
        """
        # `split` returns gaps and slots in turn, and the tail.
        parts = flat.split([*self._cuts, flat.numel() - self.numel])
        return [part.view(slot.shape) for part, slot in zip(parts[1::2], self.slots, strict=False)]

    def pack_views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat`, one a pack, in the packs' shapes."""
        return [pack.view_of(flat) for pack in self.packs]


def _find_pack(name: str, parts: Sequence[str], slots: Sequence[ParamSlot]) -> PackedSlot | None:
    """Makes the pack of the slots with these names; None if there are gaps between them."""
    first = next((index for index, slot in enumerate(slots) if slot.name == parts[0]), len(slots))
    members = slots[first : first + len(parts)]
    # No alignment is asked for: what it would cause, a gap, is looked for below.
    if [slot.name for slot in members] != list(parts) or why_not_pack([slot.shape for slot in members], 1):
        return None
    if any(before.end != after.offset for before, after in pairwise(members)):
        return None
    # One below the other: the rows have one shape, and there is no gap between them.
    rows = sum(slot.shape[0] for slot in members)
    shape = (rows, *members[0].shape[1:])
    return PackedSlot(name, first, first + len(parts), shape, members[0].offset)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
