"""`LaneSum`: gradients of a unit become one sum over its ranks, added in the order of lanes.

In:   full-size gradients of the lane that each rank has just worked through (`MainGrad.take`).
Out:  this rank's shard of their sum over all lanes of the step, with the same bits on any number of ranks.
Next: `comm/lanes.py` has the order; `sum_over_ranks.py` does the same in the library's order.

    main_grad --exchanged inside the shard group--> rows, one a lane, of this rank's shard
              --added in order--> block_grad, the lanes of one block so far
              --exchanged across replicas--> rows, one a block, of this rank's part of the shard
              --added in order--> partial_grad
              --all-gather across replicas, in the last turn--> the whole shard's gradient

A rank's own row stays where it is.  Rows are rounded to `precision.reduce`, the own one, too: a single
rank, which sends nothing, has to compute the same bits.  Sums are in `precision.accumulate`.  A
reduce-scatter sends as many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_gather, exchange_rows
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.step.sum_over_ranks import Groups, SumOverRanks
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.state import Shared
from flatfsdp.kernels.grad.add_rows import add_rows


def sizes_of_sums(group: FlatGroup) -> tuple[int, int]:
    """Lengths of what passes from turn to turn, `partial_grad` and `block_grad`; 0 for what does not."""
    lanes, grid, numel = group.unit.policy.lanes, group.unit.grid, group.master.flat.numel()
    if lanes is None or lanes.turns(grid) == 1:
        return 0, 0
    return numel // grid.replicate.size, numel if lanes.block > grid.shard.size else 0


def sums_of_lanes(group: FlatGroup) -> tuple[Tensor, Tensor] | None:
    """Memory for these two; None if nothing passes from turn to turn."""
    partial, block = sizes_of_sums(group)
    if not partial:
        return None
    dtype, device = group.unit.policy.precision.accumulate, group.master.device
    return torch.empty(partial, dtype=dtype, device=device), torch.empty(block, dtype=dtype, device=device)


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


class LaneSum(SumOverRanks):
    """Sums of one model's gradients in the order of lanes."""

    def __init__(self, shared: Shared, grids: Mapping[FlatGroup, Grid]) -> None:
        super().__init__(shared, grids)
        self._final: dict[FlatGroup, Tensor | None] = {}

    def memory_for(self, group: FlatGroup, flat: Tensor, kept: Tensor | None) -> Tensor:
        """Memory for the rows of this turn that other ranks have: one for each of their lanes."""
        self._final[group] = kept
        return _memory_for_rows(group, flat, group.grid.shard)

    def add(self, groups: Groups, flats: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
        """Adds the lanes of one turn; in the last turn the results are final.  Collective."""
        rows = self._exchanged(groups[0], flats, memory, self._grids[groups[0]].shard)
        return [self._folded(group, each) for group, each in zip(groups, rows, strict=True)]

    def _exchanged(
        self, group: FlatGroup, flats: Sequence[Tensor], memory: Sequence[Tensor], ranks: Ranks
    ) -> list[Rows]:
        """Sends all ranks their parts of these tensors, and receives this rank's part of theirs."""
        own = ranks.rank
        parts = [flat.view(ranks.size, -1) for flat in flats]
        if ranks.size > 1:
            dtype = group.unit.policy.precision.reduce
            slices = [[part for part in (rows[:own], rows[own + 1 :]) if len(part)] for rows in parts]
            sent = [[row for part in each for row in self.cast(part, dtype)] for each in slices]
            with self.sending(group, sum(each.nbytes for each in memory), ranks, len(flats)):
                for received, each in zip(memory, sent, strict=True):
                    exchange_rows(received, each, ranks)
        return [Rows(received, rows[own], own) for received, rows in zip(memory, parts, strict=True)]

    def _folded(self, group: FlatGroup, rows: Rows) -> Tensor:
        """Adds the rows of one turn to what the step has so far."""
        final, replicas = self._final.pop(group), self._grids[group].replicate
        lanes = group.unit.policy.lanes
        assert lanes is not None
        sums = rows.own if lanes.block == 1 else self._sums_of_blocks(group, rows, lanes)
        if sums is None:
            assert group.block_grad is not None and not self._shared.microbatch.is_last
            return group.block_grad
        if replicas.size > 1:
            (rows,) = self._exchanged(group, [sums], [_memory_for_rows(group, sums, replicas)], replicas)
        elif lanes.block > 1:
            # Rounded as if replicas had sent them: all meshes have the same bits.
            rows = Rows(self.cast(sums, rows.received.dtype).view(-1, rows.received.shape[1]))
        kept = self._memory_of_sum(group, final)
        total = group.partial_grad = self._added(group, group.partial_grad, rows, kept)
        # Its presence is a fact.
        group.state.changes += 1
        if not self._shared.microbatch.is_last:
            return total
        group.partial_grad = None
        if replicas.size == 1:
            return total
        whole = total.new_empty(replicas.size * total.numel())
        nbytes = whole.nbytes * (replicas.size - 1) // replicas.size
        with (
            group.unit.moving("all_gather_replicas", "all_reduce", nbytes),
            launch(replicas, group.unit.identify(Action.REDUCE_REPLICAS), self._shared.device),
        ):
            all_gather(whole, total, replicas)
        return whole

    def _memory_of_sum(self, group: FlatGroup, final: Tensor | None) -> Tensor | None:
        """Memory at a fixed address for `partial_grad`; None if there is none.

        Args:
            final: memory that the optimizer will read, if that has a fixed address and is free.
        """
        if group.kept_sums is not None:
            return group.kept_sums[0]
        # One turn: right into the memory that the optimizer will read.
        is_final = self._shared.microbatch.turns == 1 and self._grids[group].replicate.size == 1
        fits = final is not None and final.dtype == group.unit.policy.precision.accumulate
        return final if is_final and fits else None

    def _sums_of_blocks(self, group: FlatGroup, rows: Rows, lanes: Lanes) -> Tensor | None:
        """Sums of the blocks that end in this turn, one after the other; None if their block goes on."""
        shards, turns = 1 + len(rows.received), lanes.turns_of_block(group.grid)
        if turns == 1:
            blocks = (rows.of_block(first, lanes.block) for first in range(0, shards, lanes.block))
            return torch.cat([self._added(group, None, each, None) for each in blocks])
        _, kept = group.kept_sums or (None, None)
        total = group.block_grad = self._added(group, group.block_grad, rows, kept)
        group.state.changes += 1
        if self._shared.microbatch.turn % turns < turns - 1:
            return None
        group.block_grad = None
        return total

    def _added(self, group: FlatGroup, total: Tensor | None, rows: Rows, kept: Tensor | None) -> Tensor:
        """Adds rows to a sum in their order; None begins one, in memory that is kept for it if any is."""
        is_first, received = total is None, rows.received
        if total is None:
            dtype = group.unit.policy.precision.accumulate
            total = received.new_empty(received.shape[1], dtype=dtype) if kept is None else kept
        add_rows(total, *rows, first=is_first)
        nbytes = received.nbytes + (0 if rows.own is None else rows.own.nbytes)
        self._shared.ledger.add("accumulate", nbytes + (1 if is_first else 2) * total.nbytes)
        return total


def _memory_for_rows(group: FlatGroup, flat: Tensor, ranks: Ranks) -> Tensor:
    """Memory for what the other ranks send of tensors as long as `flat`: a row each."""
    dtype = group.unit.policy.precision.reduce
    return flat.new_empty(ranks.size - 1, flat.numel() // ranks.size, dtype=dtype)
