"""What our optimizers find at a parameter: its place in a master shard, and what a step writes besides.

In:   a flat group.
Out:  `flat_shard` and `viewed_shard` of the parameters that the optimizer has (`contract/flat_shard.py`).
Next: `optim/fused.py` steps neighbouring local shards as one, and writes the compute shard as well.
"""

from __future__ import annotations

from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.attribute import LeftOut
from flatfsdp.contract.flat_shard import FLAT_SHARD, VIEWED_SHARD, FlatShard, Moved, Pieces
from flatfsdp.engine.storage.group import FlatGroup


def attach_targets(group: FlatGroup) -> None:
    """Gives `flat_shard` and `viewed_shard` to the parameters of this group that an optimizer has."""
    viewed = GroupViews(group) if group.master.is_divided else None
    for parameter, start, stop in group.master.local_shards:
        FLAT_SHARD.leave(parameter, ShardTarget(group, start, stop))
        VIEWED_SHARD.leave(parameter, viewed)


class ShardTarget(LeftOut):
    """Elements [start, stop) of one group's master shard, as a `FlatShard`.

    Attributes:
        group: the group.
        grid: the ranks over which the buffer is sharded, replicated and split.
        identify: tells what a collective for this parameter carries.
        device: the device that the model computes on.
        rounding: the dtype of `compute`, to which values are rounded before an amax is taken.
        is_counted: whether this rank counts the gradient in a norm: of ranks with the same one, one does.
    """

    def __init__(self, group: FlatGroup, start: int, stop: int) -> None:
        unit = group.unit
        self.group = group
        self.grid = unit.grid
        self.identify = unit.identify
        self.device = unit.shared.device
        self.rounding = unit.policy.precision.compute
        self.is_counted = group.master.is_counted
        self._start, self._stop = start, stop

    @property
    def stages(self) -> Ranks:
        """The ranks of the pipeline; without one, alone."""
        return self.group.master.stages

    @property
    def pieces(self) -> Pieces | None:
        """Pieces of the buffer, with lanes; see `FlatShard`."""
        master, lanes = self.group.master, self.group.unit.policy.lanes
        start = master.start + self._start
        return None if lanes is None else Pieces(master.in_model, start, master.layout.bounds)

    @property
    def moved(self) -> Moved | None:
        """What a step has changed of the model besides gradients; see `FlatShard`."""
        return self.group.unit.shared.scales if self.group.unit.is_used else None

    @property
    def compute(self) -> Tensor | None:
        """The compute shard that an optimizer may write; None if there is none of its own."""
        shard, is_offloaded = self.group.compute_shard, self.group.master.is_offloaded
        # An offloaded master is updated on the host, where this shard is not.  FP8 scales come from amaxes of
        # all ranks, which are known after the optimizer's step.
        if is_offloaded or not shard.has_own_memory or shard.tensor.dtype.itemsize == 1:
            return None
        return shard.tensor[self._start : self._stop]

    def runs(self) -> list[tuple[int, int, Tensor]]:
        """Runs of elements whose amax is wanted, each with the tensor to put it in; see `FlatShard`."""
        # A weight is in one local shard: those are cut between weights.
        return self.group.compute_shard.amaxes_of(self._start, self._stop)

    def cast_done(self) -> None:
        """Notes that the parameter, `compute` and the amaxes have been written from the same values."""
        if not self.group.master.is_offloaded:
            self.group.compute_shard.elements_done(self._start, self._stop)


class GroupViews(LeftOut):
    """The master shard of a group as a `ViewedShard`: several parameters, one for each slot.

    Attributes:
        flat: the whole master shard.
        views: the local shards.
        joint_grad: returns the gradient of neighbouring local shards together; see `MasterShard`.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group, master = group, group.master
        self.flat, self.views, self.joint_grad = master.flat, master.local_shards, master.joint_grad

    @property
    def place(self) -> tuple[object, int]:
        """The same object for all shards of a model, and the number of the shard in it."""
        return self._group.master.in_model.answers, self._group.master.in_model.number

    def joined(self, start: int, stop: int) -> FlatShard:
        """The target of neighbouring local shards together."""
        return ShardTarget(self._group, start, stop)
