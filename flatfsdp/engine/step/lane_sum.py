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

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.collectives import all_gather, exchange_rows
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.step.sum_over_ranks import Groups, Rows, SumOverRanks, Tensors
from flatfsdp.engine.storage.group import FlatGroup, RunningSum


class LaneSum(SumOverRanks):
    """Sums of one model's gradients in the order of lanes."""

    def memory_for(
        self, group: FlatGroup, flat: Tensor, kept: Tensor | None, ranks: Ranks | None = None
    ) -> Tensor:
        """Memory for what other ranks, by default of the shard group, send of tensors like `flat`: rows."""
        others = (ranks or group.grid.shard).size - 1
        return flat.new_empty(others, flat.numel() // (others + 1), dtype=group.unit.policy.precision.reduce)

    def add(
        self, groups: Groups, flats: Tensors, memory: Tensors, kept: Sequence[Tensor | None], *, ends: bool
    ) -> Tensors:
        """Adds the lanes of one turn; after the last turn's the results are final.  Collective."""
        self._ends = ends
        rows = self._exchanged(groups[0], flats, memory, self._grids[groups[0]].shard)
        return [self._folded(*each) for each in zip(groups, rows, kept, strict=True)]

    def _exchanged(self, group: FlatGroup, flats: Tensors, memory: Tensors, ranks: Ranks) -> list[Rows]:
        """Sends all ranks their parts of these tensors, and receives this rank's part of theirs."""
        own = ranks.rank
        parts = [flat.view(ranks.size, -1) for flat in flats]
        if ranks.size > 1:
            dtype = group.unit.policy.precision.reduce
            slices = [[part for part in (rows[:own], rows[own + 1 :]) if len(part)] for rows in parts]
            sent = [[row for part in each for row in self.cast(part, dtype)] for each in slices]
            nbytes = sum(each.nbytes for each in memory)
            with group.unit.sending("reduce_scatter", "reduce", nbytes, ranks, self.action, len(flats)):
                for received, each in zip(memory, sent, strict=True):
                    exchange_rows(received, each, ranks)
        return [Rows(received, rows[own], own) for received, rows in zip(memory, parts, strict=True)]

    def _folded(self, group: FlatGroup, rows: Rows, kept: Tensor | None) -> Tensor:
        """Adds the rows of one turn to what the step has so far."""
        replicas = self._grids[group].replicate
        lanes = group.unit.policy.lanes
        assert lanes is not None
        sums = rows.own if lanes.block == 1 else self._sums_of_blocks(group, rows, lanes)
        if sums is None:
            assert group.block_grad.so_far is not None and not self._ends
            return group.block_grad.so_far
        if replicas.size > 1:
            (rows,) = self._exchanged(group, [sums], [self.memory_for(group, sums, None, replicas)], replicas)
        elif lanes.block > 1:
            # Rounded as if replicas had sent them: all meshes have the same bits.
            rows = Rows(self.cast(sums, rows.received.dtype).view(-1, rows.received.shape[1]))
        # Replicas have parts of what the optimizer will read.
        memory = self.memory_of_sum(group, kept if replicas.size == 1 else None)
        total = self.added(group, group.partial_grad, rows, memory, ends=self._ends)
        if replicas.size == 1 or not self._ends:
            return total
        whole = total.new_empty(replicas.size * total.numel())
        nbytes = whole.nbytes * (replicas.size - 1) // replicas.size
        action = Action.REDUCE_REPLICAS
        with group.unit.sending("all_gather_replicas", "all_reduce", nbytes, replicas, action):
            all_gather(whole, total, replicas)
        return whole

    def _sums_of_blocks(self, group: FlatGroup, rows: Rows, lanes: Lanes) -> Tensor | None:
        """Sums of the blocks that end in this turn, one after the other; None if their block goes on."""
        shards, turns = 1 + len(rows.received), lanes.turns_of_block(group.grid)
        if turns == 1:
            blocks = (rows.of_block(first, lanes.block) for first in range(0, shards, lanes.block))
            return torch.cat([self.added(group, RunningSum(), each, None, ends=True) for each in blocks])
        ends = self._shared.microbatch.turn % turns == turns - 1
        total = self.added(group, group.block_grad, rows, group.block_grad.memory, ends=ends)
        return total if ends else None
