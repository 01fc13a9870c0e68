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

from flatfsdp.contract.attribute import OfThisProcess
from flatfsdp.contract.operand import FP8_OPERAND, Operand
from flatfsdp.engine.storage.compute_shard import ComputeShard
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.storage.packed_operands import Operands
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, one_by_one
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many

FP8_DTYPE = torch.float8_e4m3fn


class FP8Shard(ComputeShard):
    """A compute shard in FP8, with the scales of the weights.

    Attributes:
        amax: amaxes of this rank's pieces, FP32 [slots].
        scales: scales of all slots, at a fixed address.
    """

    def __init__(self, master: MasterShard) -> None:
        super().__init__(master, FP8_DTYPE)
        layout, ranks = master.layout, master.grid.shard
        self.is_cast_once_a_load = not master.flat.requires_grad
        # Master values are rounded to it before the cast.
        self._through = master.unit.policy.precision.compute
        pieces = layout.pieces(ranks.rank, ranks.size)
        # The slots of this rank's pieces, which are neighbours.
        first = layout.slots.index(pieces[0].slot) if pieces else 0
        self._own = slice(first, first + len(pieces))
        self.amax = torch.zeros(len(layout.slots), device=master.device)
        amaxes = self.amax[self._own].split(1)
        self._runs = [(p.shard_offset, p.shard_stop, amax) for p, amax in zip(pieces, amaxes, strict=False)]
        self.scales = align_inverses(Scales(torch.ones_like(self.amax), torch.ones_like(self.amax)))

    def measure(self) -> None:
        """Takes the amaxes of this rank's pieces, unless the optimizer has done it."""
        if self.state.is_measured:
            return
        shard = self.master.flat.detach()
        sources, kept = self._cut(shard), self.amax.zero_()[self._own]
        # An offloaded shard is measured on the host.
        amax = kept if kept.device == shard.device else torch.zeros_like(kept, device=shard.device)
        max_abs_many(sources, amax, through=self._through)
        if amax is not kept:
            kept.copy_(amax)
        self.master.unit.shared.ledger.add("measure", sum(source.nbytes for source in sources))
        self._state.changes += 1
        self._state.is_measured = True

    def amaxes_of(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Pieces that begin in [start, stop), with positions from `start` on, and amaxes that are zero."""
        if self.master.is_offloaded:
            # The optimizer runs on the host, and the amaxes are on the device; `measure` takes them later.
            return []
        # Now, because the optimizer is about to overwrite them.
        self._state.changes += 1
        self._state.is_measured = False
        inside = [(a - start, b - start, amax) for a, b, amax in self._runs if start <= a < stop]
        if inside:
            torch._foreach_zero_([amax for _, _, amax in inside])
        return inside

    def _all_done(self) -> None:
        # The bytes are cast once the scales are known.
        self._state.is_measured = True

    def set_scales(self, scales: Scales) -> None:
        """Takes the scales for the master's current values; no backward of an earlier step may follow.

        Args:
            scales: scales of the slots; equal within a pack.
        """
        for own, new in zip(self.scales, scales, strict=True):
            own.copy_(new)
        state = self.state
        state.changes += 1
        state.is_scaled, state.is_cast = True, False

    def _convert(self, master: Tensor) -> None:
        scale = self.scales.scale[self._own]
        cast_many(self._cut(master), self._cut(self.tensor), scale, through=self._through)

    def _cut(self, shard: Tensor) -> Sequence[Tensor]:
        """This rank's pieces of the weights."""
        return [shard[start:stop] for start, stop, _ in self._runs]


class FP8Weights(Operands):
    """FP8 form of one group's gathered weights.  Modules see NaN in their place.

    Args:
        shard: shard that is gathered, with the scales; `has_transposes` of its state is written here.
        unsharded: flat buffer, E4M3, 1-D, padded; its memory must exist now, and may come and go later.

    Attributes:
        columnwise: transposes of the weights, and of packs as a whole, in the weights' layout.
    """

    columnwise: FlatBuffer

    def __init__(self, shard: FP8Shard, unsharded: Tensor) -> None:
        policy, layout, device = shard.master.unit.policy, shard.master.layout, unsharded.device
        # NaN without memory, in the dtype that gradients have.
        nan = torch.full((), torch.nan, dtype=policy.precision.compute, device=device)
        super().__init__(nan.expand(unsharded.shape))
        self._state = shard.master.state
        self.columnwise = FlatBuffer(unsharded.numel(), FP8_DTYPE, device, poison=policy.debug.poison_on_free)
        self._parts = layout.views(unsharded)
        rowwise = [run.view_of(unsharded) for run in layout.runs]
        # Refilling the memory must not look to autograd like a write to what it has saved.
        columnwise, targets = (
            [view.view(view.shape[::-1]) for view in (run.view_of(flat) for run in layout.runs)]
            for flat in (self.columnwise.tensor.data, self.columnwise.tensor)
        )
        self._to_transpose = list(zip(rowwise, targets, strict=True))
        self.columnwise.free()
        inverses = [each.scale_inv for each in one_by_one(shard.scales)]
        # By slot, the operand that it is in, whose parts have equal scales.
        self._of_slots = [
            (run, Operand(None, forward, backward, inverses[run.first], inverses[run.first]))
            for run, forward, backward in zip(layout.runs, rowwise, columnwise, strict=True)
            for _ in run.slots
        ]

    def leave_on(self, tensor: Tensor, slots: range) -> None:
        """Leaves on the tensor over these slots a function that returns its FP8 operand."""
        FP8_OPERAND.leave(tensor, OfThisProcess(self._operand, slots))

    def _operand(self, slots: range) -> Operand:
        """A weight, or a pack, as an operand of GEMMs.

        Its memory exists while the group is unsharded, that of the columnwise form only in the backward.  For
        a part of a pack, the columnwise form is a copy of a slice of the pack's, made here.
        """
        run, whole = self._of_slots[slots.start]
        if slots == run.slots:
            return whole
        part, columnwise = self._parts[slots.start], None
        if self._state.has_transposes:
            assert whole.columnwise is not None
            first_row = sum(each.shape[0] for each in self._parts[run.first : slots.start])
            columnwise = whole.columnwise.narrow(1, first_row, part.shape[0]).contiguous()
        return whole._replace(rowwise=part, columnwise=columnwise)

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
