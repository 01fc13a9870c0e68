"""`ComputeShard`: the shard of a group that is gathered, and the master version that it was cast from.

In:   the master shard, which optimizers and loads write to.
Out:  this rank's part in the dtype that the model computes in, or FP8 bytes with one scale a weight.
Next: `group.py` gathers it into the flat buffer.

    version        of the master; changes with every in-place write
    is_measured    the amaxes of that version have been taken (FP8 weights)
    is_scaled      the scales of that version have been set (FP8 weights)
    is_cast        the compute shard holds that version

An optimizer that writes the compute shard, or takes the amaxes, along with the master calls `portion_done`;
otherwise both are done before the next gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.byte_ledger import span
from flatfsdp.engine.storage.fp8_weights import FP8Weights
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.storage.shared import UnitMember
from flatfsdp.engine.storage.state import GroupState, Version
from flatfsdp.kernels.cast.scaling import Scales
from flatfsdp.torch_private import shares_memory


def compute_tensor(master: MasterShard, dtype: torch.dtype) -> Tensor:
    """Memory for a compute shard, 1-D: the master shard's own if no cast is needed."""
    flat = master.flat
    if dtype == flat.dtype and not master.is_offloaded:
        return flat.data
    return torch.zeros(flat.shape, dtype=dtype, device=master.device)


class ComputeShard:
    """This rank's part of a group's parameters, in the form that the model computes with.

    Args:
        unit: the unit that the group is in.
        master: master shard that the values come from.
        tensor: memory of the shard, 1-D, as long as the master shard.
        fp8: scales and casts of weights that are stored in FP8; None for others.
        state: facts about the group, of which those about the master's values are written here.
        built_frozen: whether the group was frozen when it was wrapped.
    """

    def __init__(
        self,
        unit: UnitMember,
        master: MasterShard,
        tensor: Tensor,
        fp8: FP8Weights | None,
        state: GroupState,
        *,
        built_frozen: bool,
    ) -> None:
        self.tensor = tensor
        self.fp8 = fp8
        self._unit = unit
        self._master = master
        self._state = state
        self._is_cast_once_a_load = fp8 is not None and built_frozen
        # By portion, the version that an optimizer has written together with what goes with it.
        self._done: dict[tuple[int, int], Version] = {}

    @property
    def version(self) -> Version:
        """Version of the master shard; every in-place write changes it, as an optimizer step or a load does.

        For FP8 weights that were built frozen it counts loads only, which all ranks make.  If it counted
        other writes, a rank whose shard was written to would ask for new scales alone.
        """
        master = self._master  # `master.version` is inlined: asked for often
        return master.generation, -1 if self._is_cast_once_a_load else master.flat._version

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the master shard's."""
        storage = self._master.flat.untyped_storage()
        return self.tensor.numel() > 0 and not shares_memory(self.tensor, storage)

    @property
    def state(self) -> GroupState:
        """Facts about the group, for the master's current values."""
        return self._state.of_version(self.version)

    def expire(self) -> None:
        """Marks its values as stale, even if no in-place write to the master was counted.

        FP8 weights that were built frozen stay valid: they are cast once a load.
        """
        if not self._is_cast_once_a_load:
            state = self._state
            state.changes += 1
            state.is_measured = state.is_scaled = state.is_cast = False

    def measure(self) -> None:
        """Takes the amaxes of this rank's pieces of FP8 weights, unless the optimizer has done it."""
        assert self.fp8 is not None
        if not self.state.is_measured:
            self._unit.shared.ledger.add("measure", self.fp8.measure(self._master))
            self._state.changes += 1
            self._state.is_measured = True

    def set_scales(self, scales: Scales) -> None:
        """Sets the scales of the FP8 weights for the master's current values."""
        assert self.fp8 is not None
        self.fp8.set_scales(scales)
        state = self.state
        state.changes += 1
        state.is_scaled, state.is_cast = True, False

    def amaxes_of(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Runs in [start, stop) whose amaxes an optimizer takes as it updates them; see `FlatShard.runs`."""
        assert self.fp8 is not None
        self._state.changes += 1
        self._state.is_measured = False
        return self.fp8.runs(start, stop)

    def portion_done(self, start: int, stop: int) -> None:
        """Notes that an optimizer has updated a portion of the master shard, and written what goes with it.

        It may be several neighbouring portions together.
        """
        state, version = self.state, self.version
        state.changes += 1
        self._done[start, stop] = version
        done = [part for part, of_part in self._done.items() if of_part == version]
        if all(
            any(a <= p.start and p.stop <= b for a, b in done)
            for p in self._master.portions
            if p.start < p.stop
        ):
            if self.fp8 is None:
                state.is_cast = True
            else:
                state.is_measured = True

    def cast(self) -> None:
        """Casts the master shard, even if the compute shard is current."""
        ledger, microbatch = self._unit.shared.ledger, self._unit.shared.microbatch.index
        master, shard = self._master.flat.detach(), self.tensor
        if self._master.is_offloaded:
            nbytes = master.numel() * master.element_size()
            with span("upload", self._unit.name, microbatch, nbytes):
                master = master.to(shard.device, non_blocking=True)
            ledger.add("offload", nbytes)
        if self.has_own_memory:
            nbytes = master.numel() * (master.element_size() + shard.element_size())
            with span("cast", self._unit.name, microbatch, nbytes):
                if self.fp8 is None:
                    shard.copy_(master)
                else:
                    self.fp8.cast(master, shard)
            ledger.add("cast", nbytes)
        state = self.state
        state.changes += 1
        state.is_cast = True
