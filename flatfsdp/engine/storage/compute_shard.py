"""`ComputeShard`: the shard of a group that is gathered, and the master version that it was cast from.

In:   the master shard, which optimizers and loads write to.
Out:  this rank's part in the dtype that the model computes in; `fp8_storage.py` has the form for FP8.
Next: `group.py` gathers it into the flat buffer.

    version        of the master; changes with every in-place write
    is_measured    the amaxes of that version have been taken (FP8 weights)
    is_scaled      the scales of that version have been set (FP8 weights)
    is_cast        the compute shard holds that version

An optimizer that writes the compute shard, or takes the amaxes, along with the master calls `elements_done`;
otherwise both are done before the next gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.storage.state import GroupState, Version


class ComputeShard:
    """This rank's part of a group's parameters, in the form that the model computes with.

    Args:
        master: master shard that the values come from; facts about them are written to the group's state.
        dtype: dtype of the shard; default: the one that the model computes in.

    Attributes:
        tensor: memory of the shard, 1-D, as long as the master shard: the master's own if no cast is needed.
        has_own_memory: whether it is not the master shard's.
        is_cast_once_a_load: whether writes that are no loads do not count: FP8 weights, built frozen.
    """

    is_cast_once_a_load = False

    def __init__(self, master: MasterShard, dtype: torch.dtype | None = None) -> None:
        flat, dtype = master.flat, dtype or master.unit.policy.precision.compute
        self.tensor = flat.data
        # An offloaded shard is uploaded even if no cast is needed.
        needs_own = dtype != flat.dtype or master.is_offloaded
        if needs_own:
            self.tensor = torch.zeros(flat.shape, dtype=dtype, device=master.device)
        self.has_own_memory = needs_own and flat.numel() > 0
        self.master = master
        self._state = master.state
        # By local shard, the version that an optimizer has written together with what goes with it.
        self._done: dict[tuple[int, int], Version] = {}

    @property
    def version(self) -> Version:
        """Version of the master shard; every in-place write changes it, by an optimizer or a load.

        For FP8 weights that were built frozen it counts loads only, which all ranks make.  If it counted
        other writes, a rank whose shard was written to would ask for new scales alone.
        """
        master = self.master  # `master.version` is inlined: asked for often
        return master.generation, -1 if self.is_cast_once_a_load else master.flat._version

    @property
    def state(self) -> GroupState:
        """Facts about the group, for the master's current values."""
        return self._state.of_version(self.version)

    def expire(self) -> None:
        """Marks its values as stale, even if no in-place write to the master was counted.

        FP8 weights that were built frozen stay valid: they are cast once a load.
        """
        if not self.is_cast_once_a_load:
            state = self._state
            state.changes += 1
            state.is_measured = state.is_scaled = state.is_cast = False

    def amaxes_of(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Runs in [start, stop) whose amaxes an optimizer takes as it updates them; see `FlatShard.runs`."""
        return []

    def elements_done(self, start: int, stop: int) -> None:
        """Notes that an optimizer has updated these elements, and written what goes with them.

        They may be a local shard's, or those of several neighbours.
        """
        self.state.changes += 1
        version = self._done[start, stop] = self.version
        done = [part for part, of_part in self._done.items() if of_part == version]
        filled = (local for local in self.master.local_shards if local.start < local.stop)
        # One flag is for the whole shard, and an optimizer may leave out local shards that have no gradient.
        if all(any(a <= start and stop <= b for a, b in done) for _, start, stop in filled):
            self._all_done()

    def _all_done(self) -> None:
        self._state.is_cast = True

    def cast(self) -> None:
        """Casts the master shard, if it has changed."""
        if self.state.is_cast:
            return
        unit, master, shard = self.master.unit, self.master.flat.detach(), self.tensor
        if self.master.is_offloaded:
            # From pinned memory, so the host does not wait for it.
            with unit.moving("upload", "offload", master.nbytes):
                master = master.to(shard.device, non_blocking=True)
        if self.has_own_memory:
            with unit.moving("cast", "cast", master.nbytes + shard.nbytes):
                self._convert(master)
        self._state.changes += 1
        self._state.is_cast = True

    def _convert(self, master: Tensor) -> None:
        self.tensor.copy_(master)
