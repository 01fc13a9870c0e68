"""`LaneSum`: gradients of a unit become one sum over its ranks, added in the order of lanes.

In:   full-size gradients of the lane that each rank has just worked through (`MainGrad.take`).
Out:  this rank's shard of their sum over all lanes of the step, with the same bits on any number of ranks.
Next: `comm/lanes.py` has the order; `sum_over_ranks.py` does the same in the library's order.

    main_grad --all-to-all inside the shard group--> rows, one a lane, of this rank's shard
              --added in order--> block_grad, the lanes of one block so far
              --all-to-all across replicas--> rows, one a block, of this rank's part of the shard
              --added in order--> partial_grad
              --all-gather across replicas, in the last turn--> the whole shard's gradient

What travels is rounded to `precision.reduce` on every rank, also on one that sends nothing: a single rank has
to compute the same bits.  Sums are in `precision.accumulate`.  A reduce-scatter sends as many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_gather, all_to_all
from flatfsdp.comm.grid import Grid
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


class LaneSum(SumOverRanks):
    """Sums of one model's gradients in the order of lanes."""

    def __init__(self, shared: Shared, grids: Mapping[FlatGroup, Grid]) -> None:
        super().__init__(shared, grids)
        self._final: dict[FlatGroup, Tensor | None] = {}

    def memory_for(self, group: FlatGroup, flat: Tensor, kept: Tensor | None) -> Tensor:
        """Memory for the rows of this turn, one for each lane that the shard's ranks have worked through."""
        self._final[group] = kept
        if group.grid.shard.size == 1:
            return flat
        return flat.new_empty(flat.numel(), dtype=group.unit.policy.precision.reduce)

    def add(self, groups: Groups, flats: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
        """Adds the lanes of one turn; in the last turn the results are final.  Collective."""
        first = groups[0]
        ranks = self._grids[first].shard
        payloads = [self.cast(flat, first.unit.policy.precision.reduce) for flat in flats]
        rows = payloads
        if ranks.size > 1:
            rows = memory
            with self.sending(first, payloads, ranks):
                for received, payload in zip(rows, payloads, strict=True):
                    all_to_all(received, payload, ranks)
        return [
            self._folded(group, each.view(ranks.size, -1)) for group, each in zip(groups, rows, strict=True)
        ]

    def _folded(self, group: FlatGroup, lanes_in_rows: Tensor) -> Tensor:
        """Adds the rows of one turn to what the step has so far."""
        final = self._final.pop(group)
        blocks = self._blocks(group, lanes_in_rows)
        if blocks is None:
            assert group.block_grad is not None and not self._shared.microbatch.is_last
            return group.block_grad
        replicas = self._grids[group].replicate
        if replicas.size > 1:
            received = torch.empty_like(blocks)
            with self.sending(group, [blocks], replicas):
                all_to_all(received, blocks, replicas)
            blocks = received.view(replicas.size, -1)
        kept = self._memory_of_sum(group, final)
        total = group.partial_grad = self._added(group, group.partial_grad, blocks, kept)
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

    def _blocks(self, group: FlatGroup, rows: Tensor) -> Tensor | None:
        """Sums of the blocks that end in this turn, one a row; None if their block goes on."""
        policy, shards = group.unit.policy, len(rows)
        assert policy.lanes is not None
        block = policy.lanes.block
        if block == 1:
            return rows
        if shards >= block:
            sums = torch.stack([self._added(group, None, each, None) for each in rows.split(block)])
        else:
            turns = block // shards
            _, kept = group.kept_sums or (None, None)
            total = group.block_grad = self._added(group, group.block_grad, rows, kept)
            group.state.changes += 1
            if self._shared.microbatch.turn % turns < turns - 1:
                return None
            group.block_grad = None
            sums = total.view(1, -1)
        # What replicas send each other, if there are any: rounded on all meshes alike.
        return self.cast(sums, policy.precision.reduce)

    def _added(self, group: FlatGroup, total: Tensor | None, rows: Tensor, kept: Tensor | None) -> Tensor:
        """Adds rows to a sum in their order; None begins one, in memory that is kept for it if any is."""
        is_first = total is None
        if total is None:
            dtype = group.unit.policy.precision.accumulate
            total = rows.new_empty(rows.shape[1], dtype=dtype) if kept is None else kept
        add_rows(total, rows, first=is_first)
        self._shared.ledger.add("accumulate", rows.nbytes + (1 if is_first else 2) * total.nbytes)
        return total
