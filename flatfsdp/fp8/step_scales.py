"""Scales of delayed scaling as they were when a step began, should the step be left out.

In:   the scaling states that the training forwards of a step use (`note`).
Out:  the same states after the optimizer has decided (`settle`): as they are, or as they were.
Next: the engine begins a step with its first training forward; optimizers settle it.

    scale, history --first forward: copied--> forwards and backwards move on --settle--> as now, or as then

Forwards and backwards of a step with a NaN have recorded amaxes that would hold back scales for as long as a
history is.  Nobody waits for the device to know whether that was so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from flatfsdp.fp8.delayed_scaling import Arena, Scaling


class Snapshot(NamedTuple):
    """Copies of an arena's scales [n] and history [L, n]."""

    scale: Tensor
    history: Tensor


class Columns(NamedTuple):
    """Neighbouring columns of an arena, and where a snapshot has what they once were.

    Attributes:
        start, size: in the arena.
        then: where they start in the snapshot.
    """

    start: int
    size: int
    snapshot: Snapshot
    then: int


class StepScales:
    """The scales of one model as they were when its step began; a `Moved` of `contract/flat_shard.py`.

    A step begins with a training forward after an optimizer has settled the last one, or has written to the
    parameters without a word.
    """

    def __init__(self) -> None:
        self._snapshots: dict[Arena, Snapshot] = {}
        self._then: dict[Scaling, tuple[Snapshot, int]] = {}
        self._parameters: object = None
        self._is_settled = False
        self._settled_by: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_inside = False
        self._outer: StepScales | None = None

    def begin_forward(self, parameters: object) -> None:
        """A training forward begins: until `end_forward`, layers note here what they use.

        Args:
            parameters: versions of the model's parameters.
        """
        if self._is_settled or parameters != self._parameters:
            self.forget()
        self._parameters = parameters
        self._outer, self._is_inside = _current.get(), True
        _current.set(self)

    def end_forward(self) -> None:
        """The forward is over, if one has begun."""
        if self._is_inside:
            _current.set(self._outer)
            self._outer, self._is_inside = None, False

    def forget(self) -> None:
        """The step is over, or given up."""
        self._snapshots.clear()
        self._then.clear()
        self._settled_by.clear()
        self._is_settled = False

    @property
    def noted(self) -> list[Scaling]:
        """What forwards of this step have used so far."""
        return list(self._then)

    def note(self, scaling: Scaling) -> None:
        """A forward is going to use it."""
        if scaling in self._then:
            return
        arena = scaling.arena
        if arena not in self._snapshots:
            with torch.inference_mode(False):
                self._snapshots[arena] = Snapshot(arena.scale.clone(), arena.history.clone())
        self._then[scaling] = self._snapshots[arena], scaling.columns.start

    @torch.no_grad()
    @torch.inference_mode(False)
    def settle(self, taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Puts back what was there when the step began, where `taken` is 0.

        Of several optimizers that one model has, each may do that.  A second step of one of them, without a
        forward before it, has moved no scales.
        """
        if optimizer in self._settled_by:
            return
        self._settled_by.add(optimizer)
        self._is_settled = True
        by_arena: dict[Arena, list[Columns]] = {}
        for scaling, (snapshot, then) in self._then.items():
            columns = Columns(scaling.columns.start, len(scaling.fp8_max), snapshot, then)
            by_arena.setdefault(scaling.arena, []).append(columns)
        for arena, of_arena in by_arena.items():
            stays = taken.to(arena.scale.device) != 0
            for run in _neighbours(of_arena):
                start, size = run[0].start, sum(columns.size for columns in run)
                now = arena.scale.narrow(0, start, size), arena.history.narrow(1, start, size)
                for live, saved in zip(now, _saved(run, size), strict=True):
                    torch.where(stays, live, saved, out=live)


def _neighbours(of_arena: Iterable[Columns]) -> list[list[Columns]]:
    """Columns in their order, in runs without a gap."""
    runs: list[list[Columns]] = []
    end = -1
    for columns in sorted(of_arena, key=lambda columns: columns.start):
        if columns.start == end:
            runs[-1].append(columns)
        else:
            runs.append([columns])
        end = columns.start + columns.size
    return runs


def _saved(run: Sequence[Columns], size: int) -> tuple[Tensor, Tensor]:
    """What a run once was: scales [size] and history [L, size]."""
    first = run[0]
    shift = first.then - first.start
    if all(own.snapshot is first.snapshot and own.then - own.start == shift for own in run):
        saved = first.snapshot
        return saved.scale.narrow(0, first.then, size), saved.history.narrow(1, first.then, size)
    # Several arenas have become one since the step began, as in the first step of all.
    scales = [own.snapshot.scale.narrow(0, own.then, own.size) for own in run]
    histories = [own.snapshot.history.narrow(1, own.then, own.size) for own in run]
    return torch.cat(scales), torch.cat(histories, dim=1)


_current: ContextVar[StepScales | None] = ContextVar("flatfsdp_step_scales", default=None)


def note(scalings: Iterable[Scaling]) -> None:
    """A layer's training forward is going to use these; outside of FlatFSDP nobody asks."""
    step = _current.get()
    if step is not None:
        for scaling in scalings:
            step.note(scaling)
