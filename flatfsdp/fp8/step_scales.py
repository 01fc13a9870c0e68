"""`StepScales`: restores delayed-scaling state to the beginning of a step that the optimizer skips.

In:   the scaling states that training forwards of a step use (`note`).
Out:  the same states after the optimizer's decision (`settle`): kept or restored.
Next: the engine begins a step with its first training forward; optimizers settle it.

    scale, history --first forward: copied--> forwards and backwards update --settle--> kept or restored

A step with a NaN has recorded amaxes that would hold back scales as long as the history.  The decision is
made on the device, without a host sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.fp8.delayed_scaling import Arena, Scaling, update


class Snapshot(NamedTuple):
    """Copies of an arena's scales [n] and history [L, n]."""

    scale: Tensor
    history: Tensor


class Columns(NamedTuple):
    """Adjacent columns of an arena, and their place in a snapshot.

    Attributes:
        start, size: in the arena.
        snapshot: the copies.
        then: their start in the snapshot.
    """

    start: int
    size: int
    snapshot: Snapshot
    then: int


class StepScales:
    """The scales of one model at the beginning of a step; a `Moved` of `contract/flat_shard.py`.

    A step begins with the first training forward after an optimizer has settled the last one, or has changed
    the parameters without settling it.

    Args:
        lane_ranks: with lanes, number of ranks that work through them.  Scales then stay the same until the
            step's last backward, and are updated there once, so that they do not depend on how many
            microbatches each rank runs (`comm/lanes.py`).  None: regions update them.

    Attributes:
        lane_ranks: the same.
        held: the scales that wait for this update, each with the ranks that share it.
    """

    def __init__(self, lane_ranks: int | None = None) -> None:
        self.lane_ranks = lane_ranks
        self.held: dict[Scaling, dist.ProcessGroup | None] = {}
        self._snapshots: dict[Arena, Snapshot] = {}
        self._then: dict[Scaling, tuple[Snapshot, int]] = {}
        self._without_scales: list[Scaling] = []
        self._noted_together: list[Sequence[Scaling]] = []
        self._parameters: object = None
        self._is_settled = False
        self._settled_by: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_inside = False
        self._outer: StepScales | None = None

    def begin_forward(self, parameters: object) -> None:
        """Begins a training forward; until `end_forward`, layers note the scales that they use here.

        Args:
            parameters: versions of the model's parameters.
        """
        # The second case is a step by an optimizer that settles nothing, as PyTorch's.
        if self._is_settled or parameters != self._parameters:
            self.forget()
        self._parameters = parameters
        self._outer, self._is_inside = _current.get(), True
        _current.set(self)

    def end_forward(self) -> None:
        """Ends the forward, if one has begun."""
        if self._is_inside:
            _current.set(self._outer)
            self._outer, self._is_inside = None, False

    def forget(self) -> None:
        """Forgets the step, which is over or abandoned."""
        self.held.clear()
        self._snapshots.clear()
        self._then.clear()
        self._without_scales.clear()
        self._noted_together.clear()
        self._settled_by.clear()
        self._is_settled = False

    @torch.no_grad()
    @torch.inference_mode(False)
    def abandon(self) -> None:
        """Restores the state from the beginning of a step that has failed, and forgets the step."""
        if not self._is_settled:
            for scaling in self._without_scales:
                scaling.has_scales = False
            for live, saved in self._now_and_then():
                live.copy_(saved)
        self.forget()

    def hold(self, scaling: Scaling, group: dist.ProcessGroup | None) -> None:
        """Puts off the update of scales for which amaxes are recorded now.

        Args:
            scaling: the scales.
            group: ranks that share them.

        Raises:
            ValueError: if not all ranks of the lanes share them.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        if self.lane_ranks is not None and (not scaling.recipe.reduce_amax or ranks < self.lane_ranks):
            raise ValueError(
                "lanes with delayed scaling: all ranks of the model have to share their scales; leave out "
                "reduce_amax=False and amax_reduction_group, or take CurrentScaling"
            )
        self.held[scaling] = group

    def drop_held(self) -> None:
        """Discards the amaxes that were recorded since the last update, for which there will be none."""
        for scaling in self.held:
            scaling.forget()
        self.held.clear()

    def update_held(self) -> None:
        """Updates what was put off, from the largest amaxes of all microbatches and ranks.  Collective."""
        # In the order of the first use; ranks that differ in it raise (`Arena.agree`).
        held, self.held = self.held, {}
        for group in dict.fromkeys(held.values()):
            # A layer that has got another recipe since has other scales, with the same amaxes.
            update([each for each, of in held.items() if of is group and each.is_current], group)

    @property
    def noted(self) -> list[Scaling]:
        """The scales that forwards of this step have used so far."""
        return list(self._then)

    def note_all(self, scalings: Sequence[Scaling]) -> None:
        """Notes all that a microbatch uses; only the first time in a step that it is given this sequence."""
        if not any(scalings is noted for noted in self._noted_together):
            self._noted_together.append(scalings)
            for scaling in scalings:
                self.note(scaling)

    def note(self, scaling: Scaling) -> None:
        """Notes that a forward is about to use `scaling`."""
        if scaling in self._then:
            return
        arena = scaling.arena
        if arena not in self._snapshots:
            with torch.inference_mode(False):
                self._snapshots[arena] = Snapshot(arena.scale.clone(), arena.history.clone())
        # The whole arena was copied at its first use in the step.  A layer that is noted later takes that
        # copy, because updates since then have changed its columns, too.
        self._then[scaling] = self._snapshots[arena], scaling.columns.start
        if not scaling.has_scales:
            self._without_scales.append(scaling)

    @torch.no_grad()
    @torch.inference_mode(False)
    def settle(self, taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Restores the state from the beginning of the step if `taken` is 0.

        Each of a model's optimizers may call it.  A second step of one of them, without a forward before it,
        has changed no scales.

        Args:
            taken: one number on the device; 0 if the step was skipped.
            optimizer: the caller.
        """
        if optimizer in self._settled_by:
            return
        self._settled_by.add(optimizer)
        self._is_settled = True
        # Whether there are scales is known to the host, which waits for the decision in a first step only.
        if self._without_scales and not taken.all():
            for scaling in self._without_scales:
                scaling.has_scales = False
        stays: dict[torch.device, Tensor] = {}
        for live, saved in self._now_and_then():
            if live.device not in stays:
                stays[live.device] = taken.to(live.device) != 0
            # In place: the buffers of layers are views of this memory, and the write raises the version by
            # which casts notice it.
            torch.where(stays[live.device], live, saved, out=live)

    def _now_and_then(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and histories of all that was noted, each with its copy from the beginning of the step."""
        # Sorted by where the columns are now.  Arenas may have been merged since the step began, so a layer's
        # columns, and with them its neighbours, may be others than in its snapshot.  Neighbours make one run:
        # a model is then restored by two launches instead of two a layer.
        by_arena: dict[Arena, list[Columns]] = {}
        for scaling, (snapshot, then) in self._then.items():
            columns = Columns(scaling.columns.start, len(scaling.fp8_max), snapshot, then)
            by_arena.setdefault(scaling.arena, []).append(columns)
        for arena, of_arena in by_arena.items():
            for run in _neighbours(of_arena):
                start, size = run[0].start, sum(columns.size for columns in run)
                now = arena.scale.narrow(0, start, size), arena.history.narrow(1, start, size)
                yield from zip(now, _saved(run, size), strict=True)


def _neighbours(of_arena: Iterable[Columns]) -> list[list[Columns]]:
    """Sorts columns into runs without gaps."""
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
    """The snapshot of a run: scales [size] and history [L, size]."""
    first = run[0]
    shift = first.then - first.start
    if all(own.snapshot is first.snapshot and own.then - own.start == shift for own in run):
        saved = first.snapshot
        return saved.scale.narrow(0, first.then, size), saved.history.narrow(1, first.then, size)
    # Several arenas were merged since the step began, as in the very first step.
    scales = [own.snapshot.scale.narrow(0, own.then, own.size) for own in run]
    histories = [own.snapshot.history.narrow(1, own.then, own.size) for own in run]
    return torch.cat(scales), torch.cat(histories, dim=1)


_current: ContextVar[StepScales | None] = ContextVar("flatfsdp_step_scales", default=None)


def note(scalings: Iterable[Scaling]) -> None:
    """Notes that a layer's training forward is about to use these; outside FlatFSDP nobody holds them."""
    step = _current.get()
    for scaling in scalings:
        scaling.held_by = None if step is None or step.lane_ranks is None else step
        if step is not None:
            step.note(scaling)
