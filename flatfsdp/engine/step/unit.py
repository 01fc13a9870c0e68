"""`Unit`: the parameters of one sharded module, which come and go together, and its engine state.

In:   flat groups (`engine/storage/group.py`), which `engine/build/build_unit.py` appends.
Out:  gathered parameters in the module, all groups in one launch, overlapped with compute; freed after use.
Next: `engine/step/driven_unit.py` says when.

Other units, roots and adapters ask for a unit by the attribute `fsdp_state` of its module.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.grid import Grid
from flatfsdp.engine.step.in_place_writes import WriteCheck
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.state import ShardState, Shared, UnitMember
from flatfsdp.options import Policy
from flatfsdp.torch_private import running_backward


class Derived(Protocol):
    """What layers make of gathered weights, such as FP8 copies, and graphs of forwards have saved."""

    def free(self) -> None:
        """Frees the memory of what is still saved; called as the parameters are freed."""

    def restore(self) -> None:
        """Fills what was freed with what it held; called in a backward, once the weights are gathered."""


class Unit(UnitMember):
    """Flat groups of one sharded module, and what is known of the module as a whole.

    Attributes:
        groups: the unit's flat groups: parameters built trained or frozen, stored in FP8 or not.
        outer: the unit's module around it; None for the outermost one.
        lister: the wrapper that lists the master shards as flat parameters, and has `list_flats`; None:
            modules list local shards.
        uses: number of running calls of the module, or of parts of it.
        is_whole: whether its parameters are ordinary ones for now, inside `summon_full_params`.
        writes_back: whether these are written back at the end.
        is_kept: whether the parameters stay gathered, inside `Root.kept`.
        keep_as_root: whether a root's own parameters stay gathered from its forward to its backward.
        writes: check for in-place writes to gathered parameters.
        derived: what is freed and restored together with the parameters, if a layer has any.
    """

    def __init__(self, policy: Policy, grid: Grid, shared: Shared) -> None:
        super().__init__(policy, grid, shared)
        self.groups: list[FlatGroup] = []
        self.outer: weakref.ref[nn.Module] | None = None
        self.lister: weakref.ref[Any] | None = None
        self.uses = 0
        self.is_whole = self.writes_back = False
        self.is_kept = False
        self.keep_as_root = True
        self.writes = WriteCheck(self.groups)
        self.derived: Derived | None = None
        self._forget_backward()

    @property
    def is_sharded(self) -> bool:
        """Whether some parameter is not gathered."""
        return any(group.state.shard is ShardState.SHARDED for group in self.groups)

    # ---- parameters come and go -------------------------------------------------------------------------

    def unshard(self, action: Action) -> None:
        """Starts to gather the parameters, all groups in one launch, if they are missing or stale.

        Args:
            action: purpose of the gather; a backward also needs the transposes of FP8 weights.
        """
        missing = [group for group in self.groups if group.allocate()]
        groups = self.groups if action is Action.BACKWARD else ()
        untransposed = [group for group in groups if group.operands.allocate_columnwise()]
        if not missing and not untransposed:
            return
        stream = self.shared.gather_stream
        # After the compute stream's work so far: that may still read the memory that was just allocated.
        with stream.after_compute():
            for group in missing:
                group.compute_shard.cast()
            if nbytes := sum(group.gathered_bytes for group in missing):
                with self.sending("all_gather", "gather", nbytes, self.grid.shard, action, len(missing)):
                    for group in missing:
                        group.gather()
            for group in untransposed:
                group.transpose()
        # One event for all: the compute stream waits for the unit as a whole.
        event = stream.mark()
        for group in {*missing, *untransposed}:
            group.started(event)

    def show(self, action: Action, ahead: Iterable[Unit] = ()) -> None:
        """Gathers the parameters, and lets the module see them.

        Args:
            action: purpose of the gather.
            ahead: units to gather meanwhile, for later.
        """
        # This one first: the others' gathers wait for it on the stream, and it waits for none of theirs.
        self.unshard(action)
        for unit in ahead:
            unit.unshard(action)
        for group in self.groups:
            group.wait()
        for group in self.groups:
            group.params.show()

    def reshard(self, *, if_unused: bool = False) -> None:
        """Frees the gathered parameters, and what layers have made of them.

        Args:
            if_unused: free only what was gathered ahead, and what nobody has waited for.
        """
        if if_unused:
            for group in self.groups:
                if group.state.shard is ShardState.GATHERING:
                    group.reshard()
        elif not self.is_kept:
            if self.derived is not None:
                self.derived.free()
            for group in self.groups:
                group.reshard()

    def expire(self) -> None:
        """Notes that what was gathered is stale."""
        if not self.is_kept:
            for group in self.groups:
                group.compute_shard.expire()

    # ---- what has landed in a backward ------------------------------------------------------------------

    @property
    def backward_done(self) -> bool:
        """Whether all gradients of the running backward have landed; a nested one counts separately."""
        is_awaited = any(group.is_awaited and group.num_trained for group in self.groups)
        return is_awaited and self._all_landed_in(running_backward())

    def _all_landed_in(self, backward: int) -> bool:
        landed = awaited = 0
        for group in self.groups:  # faster than sums, and asked for at each landing
            landed += len(self._landed.get((backward, group), ()))
            if group.is_awaited:
                awaited += group.num_trained
        return landed >= awaited or (backward in self._empty_in and not landed)

    def _free_after_backward(self) -> None:
        if self.policy.reshard_after_forward or self.shared.microbatch.is_last:
            self.reshard()

    def end_of_backward(self) -> None:
        """Frees what is still gathered at the end of the whole backward, and starts counting afresh."""
        for group in self.groups:
            if group.main_grad is not None:
                group.main_grad.end_backward()
            # A frozen unit does not use what was gathered ahead for it.
            group.wait()
        self._free_after_backward()
        self._forget_backward()

    def abandon(self) -> None:
        """Frees parameters and drops gradients after an exception."""
        self.reshard()
        self.expire()
        self._forget_backward()
        self.drop_gradients()

    def _forget_backward(self) -> None:
        # Slots by running backward and group: a backward that reentrant checkpointing nests in another counts
        # separately.
        self._landed: defaultdict[tuple[int, FlatGroup], set[int]] = defaultdict(set)
        self._reached_in: set[int] = set()
        self._empty_in: set[int] = set()
        self._open_uses: set[object] = set()
        self._was_followed = False

    def drop_gradients(self) -> None:
        """Drops what was accumulated and not yet reduced."""
        for group in self.groups:
            group.drop_unreduced()
            group.master.marks.take_autograds()
