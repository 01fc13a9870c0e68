"""What an optimizer may write beside the parameter: the compute shard, and the amaxes of FP8 weights.

In:   an optimizer that has updated one portion of a master shard (`optim/target.py` says what it has to do).
Out:  a group whose next unshard has nothing left to cast, or to measure.
Next: `flat_group.py` gathers.

An optimizer that knows nothing of this updates the master shard alone; the engine then casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm import Grid, Ranks
from flatfsdp.flat_group import FlatGroup
from flatfsdp.identity import Action, Identity


def attach_targets(group: FlatGroup) -> None:
    """Gives the parameters that an optimizer has of this group their `flat_shard`."""
    for parameter, start, stop in group.master.portions:
        parameter.flat_shard = PortionTarget(group, start, stop)  # type: ignore[attr-defined]


class PortionTarget:
    """Elements [start, stop) of one group's master shard, as a `FlatShard`."""

    def __init__(self, group: FlatGroup, start: int, stop: int) -> None:
        self._group = group
        self._start, self._stop = start, stop

    @property
    def grid(self) -> Grid:
        return self._group.grid

    @property
    def stages(self) -> Ranks:
        return self._group.master.stages

    def identify(self, action: Action) -> Identity | None:
        return self._group.identify(action)

    @property
    def is_counted(self) -> bool:
        return self._group.master.is_counted

    @property
    def device(self) -> torch.device:
        return self._group.master.device

    @property
    def rounding(self) -> torch.dtype:
        return self._group.policy.precision.compute

    @property
    def compute(self) -> Tensor | None:
        group = self._group
        if group.fp8 is not None or not group.casts or group.master.is_offloaded:
            return None
        return group.compute_shard[self._start : self._stop]

    def runs(self) -> list[tuple[int, int, Tensor]]:
        group = self._group
        if group.fp8 is None or group.master.is_offloaded:
            return []
        # A weight is in one portion: those are cut between weights.
        return group.fp8.runs(self._start, self._stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the parameter, pickled or not, is an ordinary one."""
        return _no_target, ()

    def cast_done(self) -> None:
        if not self._group.master.is_offloaded:
            self._group.portion_done(self._start, self._stop)


def _no_target() -> None:
    return None
