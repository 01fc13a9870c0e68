"""FP8 weights of one flat group: one byte an element in the flat buffer, which serves as weight cache.

In:   the master shard, FP32; one scale a weight, the same on all ranks (`engine/step/weight_scales.py`).
Out:  an `Operand` for each weight, which its layer multiplies with.
Next: `group.py` gathers the bytes; `layers/weight_cache.py` asks for the operand.

    master shard --round to the compute dtype, scale, saturate--> E4M3 shard --all-gather--> rowwise bytes
    rowwise bytes --transposed, once an unshard, before the backward--> columnwise bytes

Because of the rounding to the compute dtype, the bits are those of a layer that casts its own weight each
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import Operand
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.storage.state import GroupState
from flatfsdp.flat.layout import FlatLayout, gaps_and_runs
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, one_by_one
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many

FP8_DTYPE = torch.float8_e4m3fn


class FP8Weights:
    """FP8 form of one group's weights.

    Args:
        unsharded: flat buffer, E4M3, 1-D, padded; its memory must exist now, and may come and go later.
        through: dtype that master values are rounded to before the cast.
        state: facts about the group, of which `has_transposes` is written here.

    Attributes:
        columnwise: transposes of the weights, and of packs as a whole, in the weights' layout.
        amax: amaxes of this rank's pieces, FP32 [slots].
        scales: scales of all slots, at a fixed address.
    """

    def __init__(
        self,
        layout: FlatLayout,
        ranks: Ranks,
        unsharded: Tensor,
        through: torch.dtype,
        state: GroupState,
        *,
        poison: bool,
    ) -> None:
        self._slots = layout.slots
        self._packs = layout.packs
        self._pack_of = {slot: pack for pack in layout.packs for slot in pack.slots}
        self._runs = layout.runs
        self._pieces = layout.pieces(ranks.rank, ranks.size)
        runs = [(piece.shard_offset, piece.shard_offset + piece.stop - piece.start) for piece in self._pieces]
        cuts = gaps_and_runs(runs)
        self._cuts = [*cuts, layout.shard_numel(ranks.size) - sum(cuts)]
        self._through = through
        self._state = state
        self.columnwise = FlatBuffer(unsharded.numel(), FP8_DTYPE, unsharded.device, poison=poison)
        self._rowwise_views = layout.views(unsharded)
        self._rowwise_runs = self._as_runs(layout, unsharded)
        # Refilling the memory must not look to autograd like a write to what it has saved.
        self._columnwise_runs = self._turned(layout, self.columnwise.alias())
        targets = self._turned(layout, self.columnwise.tensor)
        self._to_transpose = list(zip(self._rowwise_runs, targets, strict=True))
        self.columnwise.free()
        self.amax = torch.zeros(len(self._slots), device=unsharded.device)
        self.scales = align_inverses(Scales(torch.ones_like(self.amax), torch.ones_like(self.amax)))
        singles = one_by_one(self.scales)
        forms = zip(self._runs, self._rowwise_runs, self._columnwise_runs, strict=True)
        # The scales of a pack's parts are equal.
        self._operands = {
            run.first: Operand(None, rowwise, columnwise, *[singles[run.first].scale_inv] * 2)
            for run, rowwise, columnwise in forms
        }

    def _as_runs(self, layout: FlatLayout, flat: Tensor) -> list[Tensor]:
        """Cuts a flat buffer into operands of GEMMs: packs, and single weights, in order."""
        return [run.view_of(flat) for run in self._runs]

    def _turned(self, layout: FlatLayout, flat: Tensor) -> list[Tensor]:
        """The transposes of the operands, as views of a buffer of the same layout."""
        return [view.view(view.shape[::-1]) for view in self._as_runs(layout, flat)]

    # ---- scales and bytes of this rank's shard ----------------------------------------------------------

    def set_scales(self, scales: Scales) -> None:
        """Takes the scales from `WeightScales`, once a step; no backward of an earlier step may follow.

        Args:
            scales: scales of the slots; equal within a pack.
        """
        for own, new in zip(self.scales, scales, strict=True):
            own.copy_(new)

    def runs(self, first: int, last: int) -> list[tuple[int, int, Tensor]]:
        """(start, stop, amax) of the pieces that begin in elements [first, last) of the shard.

        Positions count from `first`; `amax` is FP32 [1], zero now, and takes the piece's largest magnitude.
        """
        pieces = [piece for piece in self._pieces if first <= piece.shard_offset < last]
        if not pieces:
            return []
        amaxes = self.amax.narrow(0, self._slots.index(pieces[0].slot), len(pieces)).zero_()
        return [
            (piece.shard_offset - first, piece.shard_offset - first + piece.stop - piece.start, amax)
            for piece, amax in zip(pieces, amaxes.split(1), strict=True)
        ]

    def measure(self, master: MasterShard) -> int:
        """Takes the amaxes of the master shard's values; returns the number of bytes read."""
        shard = master.flat.detach()
        sources, kept = self._cut(shard), self._of_pieces(self.amax.zero_())
        # An offloaded shard is measured on the host.
        amax = kept if kept.device == shard.device else torch.zeros_like(kept, device=shard.device)
        max_abs_many(sources, amax, through=self._through)
        if amax is not kept:
            kept.copy_(amax)
        return sum(source.numel() * source.element_size() for source in sources)

    def cast(self, shard: Tensor, out: Tensor) -> None:
        """Casts this rank's pieces to FP8.

        Args:
            shard: master shard, on the compute device.
            out: destination, E4M3, as long as the shard.
        """
        scale = self._of_pieces(self.scales.scale)
        cast_many(self._cut(shard), self._cut(out), scale, through=self._through)

    def _cut(self, shard: Tensor) -> Sequence[Tensor]:
        """This rank's pieces of the weights."""
        return shard.split(self._cuts)[1::2]

    def _of_pieces(self, of_slots: Tensor) -> Tensor:
        """Picks, from values of all slots, those of this rank's pieces, which are neighbours."""
        first = self._slots.index(self._pieces[0].slot) if self._pieces else 0
        return of_slots.narrow(0, first, len(self._pieces))

    # ---- whole weights ----------------------------------------------------------------------------------

    def operand(self, index: int) -> Operand:
        """Weight `index` as an operand of GEMMs.

        Its memory exists while the group is unsharded, that of the columnwise form only in the backward.  For
        a part of a pack, the columnwise form is a copy of a slice of the pack's, made here.
        """
        pack = self._pack_of.get(index)
        if pack is None:
            return self._operands[index]
        whole = self._operands[pack.first]
        first_row = sum(slot.shape[0] for slot in self._slots[pack.first : index])
        columnwise = None
        if self._state.has_transposes:
            assert whole.columnwise is not None
            columnwise = whole.columnwise.narrow(1, first_row, self._slots[index].shape[0]).contiguous()
        return whole._replace(rowwise=self._rowwise_views[index], columnwise=columnwise)

    def pack_operand(self, index: int) -> Operand:
        """Pack `index` as an operand of GEMMs; see `operand`."""
        return self._operands[self._packs[index].first]

    def allocate_columnwise(self) -> bool:
        """Allocates memory for the transposes; False if they are there already."""
        if self._state.has_transposes:
            return False
        self._state.changes += 1
        self._state.has_transposes = True
        self.columnwise.allocate()
        return True

    def transpose(self) -> None:
        """Fills the columnwise form from the rowwise one."""
        transpose_many(self._to_transpose)

    def free(self) -> None:
        """Frees the transposed weights."""
        if self._state.has_transposes:
            self._state.changes += 1
            self._state.has_transposes = False
            self.columnwise.free()
