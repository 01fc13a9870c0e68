"""Gradients on their way from `main_grad` to the master shard's `.grad`.

In:   groups whose last gradient of a reducing backward has landed (`unit.py`).
Out:  `master.grad`, this rank's shard of the mean over all ranks, in the master's dtype.
Next: `optim.clip_grad_norm_` and the optimizer.

Every rank launches the reductions in one fixed order, whatever order the gradients land in: the reverse of
registration, which is the order of a backward.  A group that is ready early waits for its turn.  So ranks
whose control flow differs (a layer skipped on one of them) still pair the same collectives, and a group in
which nothing landed reduces zeros rather than leave the other ranks waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm import Grid, Lane, all_reduce_mean, compute_waits_for, reduce_scatter_mean
from flatfsdp.observe import ByteLedger, span
from flatfsdp.unshard import FlatGroup

MAX_IN_FLIGHT = 2
"""Reductions under way before the compute stream waits for the oldest: one runs while the next one's
gradients are being computed.  Bounds how many gradient buffers outlive their backward."""


class _Reduction(NamedTuple):
    """Keeps `flat`, which the lane may still read, alive until the compute stream has waited for `done`."""

    group: FlatGroup
    flat: Tensor
    shard: Tensor
    done: torch.cuda.Event | None


class Reducer:
    """Reduces the gradients of all groups of one root.

    Args:
        groups: trained groups in registration order.
        grid: as the groups', over communicators of their own.
    """

    def __init__(
        self, groups: Iterable[FlatGroup], grid: Grid, device: torch.device, ledger: ByteLedger
    ) -> None:
        self._order = list(groups)[::-1]
        self._grid = grid
        self._lane = Lane(device)
        self._ledger = ledger
        self._ready: set[FlatGroup] = set()
        self._next = 0
        self._in_flight: deque[_Reduction] = deque()
        self._reduced: list[tuple[FlatGroup, Tensor]] = []

    def ready(self, group: FlatGroup) -> None:
        """All gradients of `group` have landed: reduces it as soon as it is its turn."""
        self._ready.add(group)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._launch(self._order[self._next])
            self._next += 1

    def finish(self) -> None:
        """Reduces what is left and sets `master.grad` of every group, adding to one that is there."""
        for group in self._order[self._next :]:
            self._launch(group)
        # A nested backward (reentrant checkpointing) may have brought more to a group that was launched.
        for group in self._order:
            if group.main_grad is not None and group.main_grad.is_allocated:
                self._launch(group)
        while self._in_flight:
            self._retire()
        # Only now, so that a backward that fails half-way leaves every `.grad` as it was.
        for group, grad in self._reduced:
            self._add_to_master(group.master, grad)
        self._reset()

    def abandon(self) -> None:
        """Waits for what is under way and forgets its results."""
        for reduction in self._in_flight:
            compute_waits_for(reduction.done, reduction.shard.device)
        self._reset()

    def _reset(self) -> None:
        self._in_flight.clear()
        self._reduced.clear()
        self._ready.clear()
        self._next = 0

    def _launch(self, group: FlatGroup) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._retire()
        assert group.main_grad is not None
        flat = group.main_grad.take()
        shards, replicas = self._grid.shard, self._grid.replicate
        wire_dtype = group.policy.precision.reduce
        shard = flat
        if shards.size > 1:
            shard = flat.new_empty(group.master.numel(), dtype=wire_dtype)
        full_bytes = flat.numel() * wire_dtype.itemsize
        with self._lane.after_compute():
            payload = self._cast(flat, wire_dtype)
            if shards.size > 1:
                nbytes = full_bytes * (shards.size - 1) // shards.size
                with span("reduce_scatter", group.name, group.microbatch.index, nbytes):
                    reduce_scatter_mean(shard, payload, shards)
                self._ledger.add("reduce", nbytes)
            else:
                shard = payload
            if replicas.size > 1:
                nbytes = 2 * shard.numel() * wire_dtype.itemsize * (replicas.size - 1) // replicas.size
                with span("all_reduce", group.name, group.microbatch.index, nbytes):
                    all_reduce_mean(shard, replicas)
                self._ledger.add("reduce", nbytes)
        self._in_flight.append(_Reduction(group, flat, shard, self._lane.mark()))

    def _retire(self) -> None:
        group, _, shard, done = self._in_flight.popleft()
        compute_waits_for(done, shard.device)
        self._reduced.append((group, self._cast(shard, group.master.dtype)))

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Usually nothing: gradients are reduced in the dtype in which they were accumulated."""
        if tensor.dtype == dtype:
            return tensor
        cast = tensor.to(dtype)
        self._ledger.add("cast", tensor.numel() * (tensor.element_size() + cast.element_size()))
        return cast

    def _add_to_master(self, master: Tensor, grad: Tensor) -> None:
        if master.grad is None:
            master.grad = grad
        else:
            master.grad.add_(grad)
            self._ledger.add("accumulate", 3 * grad.numel() * grad.element_size())
