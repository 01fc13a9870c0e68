"""FP8 weights of one flat group: one byte an element in the flat buffer, which is the weight cache.

In:   the master shard, FP32; one scale a weight, the same on all ranks (`engine/step/weight_scales.py`).
Out:  an `Operand` for each weight, which the layer that has it multiplies with.
Next: `group.py` gathers the bytes; `layers/weight_cache.py` asks for the operand.

    master shard --round to the compute dtype, scale, saturate--> E4M3 shard --all-gather--> rowwise bytes
    rowwise bytes --transposed, once an unshard, before the backward--> columnwise bytes

Rounding to the compute dtype first gives the bits that a layer gets which casts its own weight in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import FP8_WEIGHTS, Operand
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import FlatLayout, Role, gaps_and_runs
from flatfsdp.kernels.cast.scaling import Scales, one_by_one
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many

FP8_DTYPE = torch.float8_e4m3fn


def roles(module: nn.Module, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Role]:
    """How each parameter is stored if FP8 weights are wanted.

    A weight is stored in FP8 if every module that holds it names it in `fp8_weights()`.
    """
    parameters = list(parameters)
    found = {}
    for parameter, sites in zip(parameters, Binding.of(module, parameters).sites, strict=True):
        declared = all(site.attribute in FP8_WEIGHTS.of(site.module)() for site in sites)
        found[parameter] = Role.FP8 if declared else Role.COMPUTE
    return found


class FP8Weights:
    """The FP8 form of the weights of one group.

    Args:
        unsharded: E4M3, 1-D, padded; its memory must be there now, and may come and go later.
        through: what the master is rounded to first.

    Attributes:
        columnwise: the transposes, of the same layout as the weights.
        amax: FP32 [slots], of this rank's pieces.
        scales: of all slots, of one generation.
    """

    def __init__(
        self,
        layout: FlatLayout,
        ranks: Ranks,
        unsharded: Tensor,
        through: torch.dtype,
        *,
        poison: bool,
    ) -> None:
        self._slots = layout.slots
        self._pieces = layout.pieces(ranks.rank, ranks.size)
        runs = [(piece.shard_offset, piece.shard_offset + piece.stop - piece.start) for piece in self._pieces]
        cuts = gaps_and_runs(runs)
        self._cuts = [*cuts, layout.shard_numel(ranks.size) - sum(cuts)]
        self._through = through
        self.columnwise = FlatBuffer(unsharded.numel(), FP8_DTYPE, unsharded.device, poison=poison)
        self._rowwise_views = layout.views(unsharded)
        # What autograd saves must not see that the memory is filled again.
        self._columnwise_views = self._turned(layout, self.columnwise.alias())
        targets = self._turned(layout, self.columnwise.tensor)
        self._to_transpose = list(zip(self._rowwise_views, targets, strict=True))
        self.columnwise.free()
        self.amax = torch.zeros(len(self._slots), device=unsharded.device)
        self.set_scales(Scales(torch.ones_like(self.amax), torch.ones_like(self.amax)))

    def _turned(self, layout: FlatLayout, flat: Tensor) -> list[Tensor]:
        """The weights' transposes in a buffer of the same layout."""
        views = layout.views(flat)
        return [view.view(slot.shape[::-1]) for slot, view in zip(self._slots, views, strict=True)]

    # ---- scales and bytes of this rank's shard ----------------------------------------------------------

    def set_scales(self, scales: Scales) -> None:
        """Called by `WeightScales`, once a step."""
        self.scales = scales
        forms = zip(self._rowwise_views, self._columnwise_views, one_by_one(scales), strict=True)
        self._operands = [
            Operand(None, rowwise, columnwise, own.scale_inv, own.scale_inv)
            for rowwise, columnwise, own in forms
        ]

    def runs(self, first: int, last: int) -> list[tuple[int, int, Tensor]]:
        """Pieces that begin in elements [first, last) of the shard: from where to where each is, counted from
        `first`, and where its amax is to be recorded, FP32 [1], zero now."""
        pieces = [piece for piece in self._pieces if first <= piece.shard_offset < last]
        if not pieces:
            return []
        amaxes = self.amax.narrow(0, self._slots.index(pieces[0].slot), len(pieces)).zero_()
        return [
            (piece.shard_offset - first, piece.shard_offset - first + piece.stop - piece.start, amax)
            for piece, amax in zip(pieces, amaxes.split(1), strict=True)
        ]

    def measure(self, master: MasterShard) -> int:
        """Takes the amax of what the master shard holds now; returns the bytes it read."""
        shard = master.flat.detach()
        sources, kept = self._cut(shard), self._of_pieces(self.amax.zero_())
        # An offloaded shard is measured on the host.
        amax = kept if kept.device == shard.device else torch.zeros_like(kept, device=shard.device)
        max_abs_many(sources, amax, through=self._through)
        if amax is not kept:
            kept.copy_(amax)
        return sum(source.numel() * source.element_size() for source in sources)

    def cast(self, shard: Tensor, out: Tensor) -> None:
        """Writes this rank's bytes.

        Args:
            shard: of the master, on the compute device.
            out: E4M3, as long.
        """
        scale = self._of_pieces(self.scales.scale)
        cast_many(self._cut(shard), self._cut(out), scale, through=self._through)

    def _cut(self, shard: Tensor) -> Sequence[Tensor]:
        """This rank's pieces of the weights."""
        return shard.split(self._cuts)[1::2]

    def _of_pieces(self, of_slots: Tensor) -> Tensor:
        """The slots of which this rank has a piece are neighbours."""
        first = self._slots.index(self._pieces[0].slot) if self._pieces else 0
        return of_slots.narrow(0, first, len(self._pieces))

    # ---- whole weights ----------------------------------------------------------------------------------

    def operand(self, index: int) -> Operand:
        """Weight `index` for products: its memory is there while the group is unsharded, that of the
        columnwise form in backward."""
        return self._operands[index]

    def allocate_columnwise(self) -> bool:
        """Gets memory for the transposes; False if there is some, and the transposes are in it."""
        if self.columnwise.is_allocated:
            return False
        self.columnwise.allocate()
        return True

    def transpose(self) -> None:
        """Fills the columnwise form from the rowwise one."""
        transpose_many(self._to_transpose)

    def free(self) -> None:
        if self.columnwise.is_allocated:
            self.columnwise.free()
