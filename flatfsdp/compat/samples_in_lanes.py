"""`SamplesInLanes`: which samples each rank trains on, so that any number of ranks trains to the same bits.

In:   the order of the samples of all ranks, the lanes, and this rank's place among the ranks.
Out:  a sampler of this rank's microbatches, in its order.

Microbatches are numbered over all ranks.  What one of them is depends on its number alone:

    8 microbatches a step, 4 lanes     2 ranks, 4 microbatches each     1 rank, 8 microbatches
    rank 0                             0 1 4 5                          0 1 2 3 4 5 6 7
    rank 1                             2 3 6 7
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from flatfsdp.comm.grid import Grid
from flatfsdp.comm.lanes import Lanes


class SamplesInLanes(Sampler[int]):
    """Indices of the samples that this rank trains on.

    Args:
        batches: batches of the samples of all ranks, the same on each: a BatchSampler.
        on_rank: number of microbatches of this rank in a step.
        names: what a user of the library calls that number, and samples that are left out at the end.
        lanes: the lanes of a step.
        grid: the ranks of the model.
        copies: how often each microbatch comes in a row, for a library that gives a rank each N-th.

    Attributes:
        skipped: number of microbatches on each rank, of whole steps, that the next epoch leaves out.

    Raises:
        ValueError: if the lanes cannot have equally many microbatches in each step.
    """

    def __init__(
        self,
        batches: Any,
        on_rank: int,
        names: tuple[str, str],
        lanes: Lanes,
        grid: Grid,
        *,
        copies: int = 1,
    ) -> None:
        self._sampler, self._lanes, self._grid = batches.sampler, lanes, grid
        self._batch: int = batches.batch_size
        self._copies, self.skipped = copies, 0
        ranks = grid.num_ranks
        self._total = ranks * on_rank
        if self._total % lanes.number:
            raise ValueError(
                f"{names[0]}={on_rank} on {ranks} ranks are {self._total} microbatches a step over "
                f"{lanes.number} lanes: each lane has to have equally many; choose it such that {ranks} "
                f"times its value is a multiple of {lanes.number}"
            )
        samples = len(self._sampler)
        rest = samples % (self._batch * lanes.number)
        if rest and not batches.drop_last:
            raise ValueError(
                f"{samples} samples in microbatches of {self._batch} over {lanes.number} lanes: at the end of"
                f" an epoch {rest} are left, too few for all lanes; {names[1]} leaves them out"
            )
        self._length = samples - rest

    def __len__(self) -> int:
        return self._length // self._grid.num_ranks * self._copies

    def __iter__(self) -> Iterator[int]:
        first, self.skipped = self.skipped * self._grid.num_ranks * self._batch, 0
        source = islice(iter(self._sampler), first, self._length)
        while step := list(islice(source, self._batch * self._total)):
            for number in self._lanes.microbatches(self._grid, len(step) // self._batch):
                own = step[number * self._batch : (number + 1) * self._batch]
                yield from own * self._copies

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, if the sampler has one for each."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
