"""`SumOverRanks`: gradients of a unit become one sum over its ranks, as the communication library adds them.

In:   full-size gradients of one backward that reduces (`MainGrad.take`).
Out:  this rank's shard of their mean, or sum; in earlier backwards than the last, a part of it.
Next: `reduce.py` says when; `lane_sum.py` adds in an order of its own.

    main_grad --reduce-scatter inside the shard group--> partial_grad, summed over the reducing backwards
              --all-reduce across replicas, in the last backward
              --all-reduce across tensor-parallel ranks, where each has a part of a sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.byte_ledger import Traffic
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.collectives import all_reduce, reduce_scatter
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.storage.group import FlatGroup, RunningSum
from flatfsdp.engine.storage.state import Shared
from flatfsdp.kernels.grad.add_rows import add_rows

Tensors = Sequence[Tensor]
Groups = Sequence[FlatGroup]
"""The groups of a unit, or those of them that are reduced together."""


class Rows(NamedTuple):
    """Rows to be added in their order.

    Attributes:
        received: [k, n], in the dtype that they were sent in.
        own: this rank's own, [n], not rounded yet; None if it is not among them.
        place: number of rows before it.
    """

    received: Tensor
    own: Tensor | None = None
    place: int = 0

    def of_block(self, first: int, size: int) -> Rows:
        """The rows [first, first + size), of all with the own one."""
        # From its place on, a row's number is greater by one than its index among those received.
        start, stop = (end - (end > self.place) for end in (first, first + size))
        is_inside = first <= self.place < first + size
        return Rows(self.received[start:stop], self.own if is_inside else None, self.place - first)


class SumOverRanks:
    """Sums of one model's gradients.

    Args:
        shared: state of the model.
        grids: the ranks that each group is reduced over.
    """

    def __init__(self, shared: Shared, grids: Mapping[FlatGroup, Grid]) -> None:
        self._shared = shared
        self._grids = grids
        # Whether what is being added is of the last backward of a step.
        self._ends = False

    def memory_for(self, group: FlatGroup, flat: Tensor, kept: Tensor | None) -> Tensor:
        """Memory that this rank receives in; allocated on the stream that uses the result.

        Args:
            group: the group.
            flat: its full-size gradient.
            kept: memory that the optimizer will read, if nothing has been reduced into it yet.
        """
        if group.grid.shard.size == 1:
            return flat
        dtype = group.unit.policy.precision.reduce
        # Otherwise it is added to a sum that is there.
        if kept is not None and kept.dtype == dtype and group.partial_grad.so_far is None:
            return kept
        return flat.new_empty(group.master.flat.numel(), dtype=dtype)

    def add(
        self, groups: Groups, flats: Tensors, memory: Tensors, kept: Sequence[Tensor | None], *, ends: bool
    ) -> Tensors:
        """Adds up one backward's gradients; after the last one's the results are final.  Collective.

        Args:
            groups: groups of one unit.
            flats: their full-size gradients, which may be overwritten.
            memory: what `memory_for` gave for each.
            kept: what it was given.
            ends: whether the gradients are of the last backward of a step.
        """
        self._ends = ends
        sums = self._reduce_scatter(groups, flats, memory)
        return [self._completed(*each) for each in zip(groups, sums, kept, strict=True)]

    def _reduce_scatter(self, groups: Groups, flats: Tensors, shards: Tensors) -> Tensors:
        first = groups[0]
        ranks, division = self._grids[first].shard, first.division
        if division is not None:
            # Before the cast to a narrow dtype of reduction, whose range is what the division is for.
            for flat in flats:
                flat.div_(division.before)
        if ranks.size == 1:
            return flats
        payloads = [self.cast(flat, first.unit.policy.precision.reduce) for flat in flats]
        nbytes = sum(each.nbytes for each in payloads) * (ranks.size - 1) // ranks.size
        with first.unit.sending("reduce_scatter", "reduce", nbytes, ranks, self.action, len(payloads)):
            for shard, payload in zip(shards, payloads, strict=True):
                reduce_scatter(shard, payload, ranks, mean=division is None)
        return shards

    def _completed(self, group: FlatGroup, reduced: Tensor, kept: Tensor | None) -> Tensor:
        """Adds what earlier backwards of this step have reduced; in the last one, reduces over all ranks."""
        total = group.partial_grad
        if total.so_far is not None or not self._ends:
            memory, dtype = self.memory_of_sum(group, kept), group.unit.policy.precision.accumulate
            if total.so_far is None and reduced.dtype == dtype and (memory is None or memory is reduced):
                # It is the sum as it is.
                total.so_far = reduced
                group.state.changes += 1
            else:
                reduced = self.added(group, total, Rows(reduced.view(1, -1)), memory, ends=self._ends)
        if not self._ends:
            return reduced
        grid, division = self._grids[group], group.division
        if grid.replicate.size > 1:
            reduced = self.cast(reduced, group.unit.policy.precision.reduce)
            mean = division is None
            self._all_reduce(group, reduced, grid.replicate, "all_reduce", Action.REDUCE_REPLICAS, mean=mean)
        if division is not None:
            # Between the two: tensor-parallel ranks have parts of one gradient, not gradients of their own.
            reduced.div_(division.after)
        if grid.tensor.size > 1:
            # In FP32 at least: it is sent once a step, which costs little, and nothing is rounded on the way.
            reduced = self.cast(reduced, torch.promote_types(reduced.dtype, torch.float32))
            self._all_reduce(group, reduced, grid.tensor, "tp_all_reduce", Action.REDUCE_PARTIAL, mean=False)
        return reduced

    def _all_reduce(
        self, group: FlatGroup, tensor: Tensor, ranks: Ranks, kind: Traffic, action: Action, *, mean: bool
    ) -> None:
        nbytes = 2 * tensor.nbytes * (ranks.size - 1) // ranks.size
        with group.unit.sending(kind, kind, nbytes, ranks, action):
            all_reduce(tensor, ranks, mean=mean)

    def memory_of_sum(self, group: FlatGroup, kept: Tensor | None) -> Tensor | None:
        """Memory at a fixed address for `partial_grad`; None if there is none.

        Args:
            kept: memory that the optimizer will read, if that has a fixed address and is free.
        """
        if group.partial_grad.memory is not None:
            return group.partial_grad.memory
        fits = kept is not None and kept.dtype == group.unit.policy.precision.accumulate
        return kept if fits else None

    def added(
        self, group: FlatGroup, total: RunningSum, rows: Rows, memory: Tensor | None, *, ends: bool
    ) -> Tensor:
        """Adds rows to a sum of the group in their order; begins it, in this memory if there is any.

        Args:
            ends: whether the sum is complete, and handed over; it begins anew then.
        """
        received, own, _ = rows
        is_first, so_far = total.so_far is None, total.so_far
        if so_far is None:
            dtype = group.unit.policy.precision.accumulate
            so_far = received.new_empty(received.shape[1], dtype=dtype) if memory is None else memory
        add_rows(so_far, *rows, first=is_first)
        nbytes = received.nbytes + (0 if own is None else own.nbytes)
        self._shared.ledger.add("accumulate", nbytes + (1 if is_first else 2) * so_far.nbytes)
        total.so_far = None if ends else so_far
        # Its presence is a fact.
        group.state.changes += 1
        return so_far

    @property
    def action(self) -> Action:
        """Purpose of what is sent inside a group of shards, or between groups."""
        return Action.REDUCE if self._ends else Action.REDUCE_EARLY

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts to another dtype; usually nothing, as gradients are accumulated in that dtype."""
        if tensor.dtype == dtype:
            return tensor
        cast = tensor.to(dtype)
        self._shared.ledger.add("cast", tensor.nbytes + cast.nbytes)
        return cast
