"""FP8 weights of one flat group: one byte an element in the flat buffer, which is the weight cache.

In:   the master shard, FP32; one scale a weight, the same on all ranks (`engine/step/weight_scales.py`).
Out:  an `Operand` for each weight, which the layer that has it multiplies with.
Next: `group.py` gathers the bytes; `layers/weight_cache.py` asks for the operand.

    master shard --round to the compute dtype, scale, saturate--> E4M3 shard --all-gather--> rowwise bytes
    rowwise bytes --transposed, once an unshard, before the backward--> columnwise bytes

Rounding to the compute dtype first gives the bits that a layer gets which casts its own weight in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import FP8_WEIGHTS, Operand
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import FlatLayout, Role, gaps_and_runs
from flatfsdp.flat.sites import Site
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, one_by_one
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many

FP8_DTYPE = torch.float8_e4m3fn


def roles(
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    read_by_others: Collection[tuple[nn.Module, str]] = (),
) -> dict[nn.Parameter, Role]:
    """How each parameter is stored if FP8 weights are wanted.

    A weight is stored in FP8 if every module that holds it names it in `fp8_weights()`, or leaves it to
    another one that does.

    Args:
        read_by_others: (module, attribute) of weights that a layer reads which does not hold them.
    """
    parameters = list(parameters)

    def is_declared(site: Site) -> bool:
        named = site.attribute in FP8_WEIGHTS.of(site.module)()
        return named or (site.module, site.attribute) in read_by_others

    sites_of = zip(parameters, Binding.of(module, parameters).sites, strict=True)
    return {p: Role.FP8 if all(map(is_declared, sites)) else Role.COMPUTE for p, sites in sites_of}


class FP8Weights:
    """The FP8 form of the weights of one group.

    Args:
        unsharded: E4M3, 1-D, padded; its memory must be there now, and may come and go later.
        through: what the master is rounded to first.

    Attributes:
        columnwise: the transposes, of joints as a whole, of the same layout as the weights.
        amax: FP32 [slots], of this rank's pieces.
        scales: of all slots, at one address for good.
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
        self._joints = layout.joints
        self._joint_of = {slot: joint for joint in layout.joints for slot in joint.slots}
        self._runs = layout.runs
        self._pieces = layout.pieces(ranks.rank, ranks.size)
        runs = [(piece.shard_offset, piece.shard_offset + piece.stop - piece.start) for piece in self._pieces]
        cuts = gaps_and_runs(runs)
        self._cuts = [*cuts, layout.shard_numel(ranks.size) - sum(cuts)]
        self._through = through
        self.columnwise = FlatBuffer(unsharded.numel(), FP8_DTYPE, unsharded.device, poison=poison)
        self._rowwise_views = layout.views(unsharded)
        self._rowwise_runs = self._as_runs(layout, unsharded)
        # What autograd saves must not see that the memory is filled again.
        self._columnwise_runs = self._turned(layout, self.columnwise.alias())
        targets = self._turned(layout, self.columnwise.tensor)
        self._to_transpose = list(zip(self._rowwise_runs, targets, strict=True))
        self.columnwise.free()
        self.amax = torch.zeros(len(self._slots), device=unsharded.device)
        self.scales = align_inverses(Scales(torch.ones_like(self.amax), torch.ones_like(self.amax)))
        singles = one_by_one(self.scales)
        forms = zip(self._runs, self._rowwise_runs, self._columnwise_runs, strict=True)
        # The scales of a joint's parts are equal.
        self._operands = {
            first: Operand(None, rowwise, columnwise, singles[first].scale_inv, singles[first].scale_inv)
            for (first, _), rowwise, columnwise in forms
        }

    def _as_runs(self, layout: FlatLayout, flat: Tensor) -> list[Tensor]:
        """What GEMMs read as one operand: joints, and weights by themselves, in order."""
        views = dict(enumerate(layout.views(flat)))
        views.update((j.first, view) for j, view in zip(self._joints, layout.joint_views(flat), strict=True))
        return [views[first] for first, _ in self._runs]

    def _turned(self, layout: FlatLayout, flat: Tensor) -> list[Tensor]:
        """Their transposes in a buffer of the same layout."""
        return [view.view(view.shape[::-1]) for view in self._as_runs(layout, flat)]

    # ---- scales and bytes of this rank's shard ----------------------------------------------------------

    def set_scales(self, scales: Scales) -> None:
        """Called by `WeightScales`, once a step: no backward of an earlier one may follow.

        Args:
            scales: of the slots; equal in a joint.
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
        """Weight `index` as an operand of GEMMs.

        Its memory is there while the group is unsharded, that of the columnwise form in the backward.  The
        columnwise form of a part of a joint is a copy, made here, of a slice of the joint's.
        """
        joint = self._joint_of.get(index)
        if joint is None:
            return self._operands[index]
        whole = self._operands[joint.first]
        first_row = sum(slot.shape[0] for slot in self._slots[joint.first : index])
        columnwise = None
        if self.columnwise.is_allocated:
            assert whole.columnwise is not None
            columnwise = whole.columnwise.narrow(1, first_row, self._slots[index].shape[0]).contiguous()
        return whole._replace(rowwise=self._rowwise_views[index], columnwise=columnwise)

    def joint_operand(self, index: int) -> Operand:
        """Joint `index` as an operand of GEMMs; see `operand`."""
        return self._operands[self._joints[index].first]

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
        """Frees the transposed weights."""
        if self.columnwise.is_allocated:
            self.columnwise.free()
