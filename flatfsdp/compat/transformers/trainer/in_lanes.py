"""What a trainer whose model has lanes does otherwise, so that any number of ranks trains to the same bits.

In:   the lanes, this rank's place among the ranks, and Trainer's sampler.
Out:  `SamplesInLanes`: which samples each rank gets; `StepInLanes`: the microbatches of a step, and its loss.
Next: `trainer.py` asks both.

Microbatches are numbered over all ranks.  What one of them is depends on its number alone:

    8 microbatches a step, 4 lanes     2 ranks, gradient_accumulation_steps=4     1 rank, of 8
    rank 0                             0 1 4 5                                    0 1 2 3 4 5 6 7
    rank 1                             2 3 6 7
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from flatfsdp.comm.grid import Grid
from flatfsdp.comm.lanes import Lanes


class SamplesInLanes(Sampler[int]):
    """Indices of the samples that this rank trains on, for Accelerate to deal out.

    Accelerate makes batches of them, and gives each N-th to this rank.  So each of this rank's batches comes
    N times in a row.

    Args:
        batches: batches of the samples of all ranks: a BatchSampler.
        lanes: the lanes of a step.
        grid: the ranks of the model.
        arguments: TrainingArguments.

    Raises:
        ValueError: if the lanes cannot have equally many microbatches in each step; if ranks may order
            samples differently, or the model has others than Trainer.
    """

    def __init__(self, batches: Any, lanes: Lanes, grid: Grid, arguments: Any) -> None:
        self._sampler, self._lanes, self._grid = batches.sampler, lanes, grid
        self._batch: int = batches.batch_size
        if not isinstance(self._sampler, SequentialSampler) and not hasattr(self._sampler, "set_epoch"):
            kind = type(self._sampler).__name__
            raise ValueError(
                f"with lanes the order of samples has to be the same on all ranks, and {kind} has no "
                "set_epoch(), so it may draw random numbers that are each rank's own; give it one"
            )
        on_rank, ranks = arguments.gradient_accumulation_steps, grid.num_ranks
        if ranks != arguments.world_size:
            raise ValueError(
                f"the model is data parallel over {ranks} of {arguments.world_size} ranks, and Trainer gives "
                "each of them other data; shard it over all"
            )
        self._total = ranks * on_rank
        if self._total % lanes.number:
            raise ValueError(
                f"gradient_accumulation_steps={on_rank} on {ranks} ranks are {self._total} microbatches a "
                f"step over {lanes.number} lanes: each lane has to have equally many; choose it such that "
                f"{ranks} times its value is a multiple of {lanes.number}"
            )
        samples = len(self._sampler)
        rest = samples % (self._batch * lanes.number)
        if rest and not batches.drop_last:
            raise ValueError(
                f"{samples} samples in microbatches of {self._batch} over {lanes.number} lanes: at the end of"
                f" an epoch {rest} are left, too few for all lanes; dataloader_drop_last=True leaves them out"
            )
        self._length = samples - rest

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        source = islice(iter(self._sampler), self._length)
        while step := list(islice(source, self._batch * self._total)):
            for number in self._lanes.microbatches(self._grid, len(step) // self._batch):
                own = step[number * self._batch : (number + 1) * self._batch]
                yield from own * self._grid.num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, if the sampler has one for each."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


class StepInLanes:
    """The microbatches of one step over all ranks.

    Args:
        lanes: the lanes.
        grid: the ranks of the model.
        on_rank: number of microbatches of each rank.
        device: where losses are.

    Attributes:
        total: number of microbatches on all ranks.
        numbers: those of this rank, in its order.
    """

    def __init__(self, lanes: Lanes, grid: Grid, on_rank: int, device: torch.device) -> None:
        self.total = on_rank * grid.num_ranks
        self.numbers = lanes.microbatches(grid, self.total)
        self._losses = torch.zeros(self.total, device=device)

    def note(self, number: int, loss: Tensor) -> None:
        """Notes the loss of a microbatch of this rank, its share of the step's."""
        self._losses[number] = loss

    def loss(self, accelerator: Any) -> Tensor:
        """The loss of the step, added in the order of numbers: 0-dim, FP32, on every rank.  Collective."""
        # Each loss meets zeros, so the order in which ranks are added does not matter.
        losses: Tensor = accelerator.reduce(self._losses, "sum")
        return losses.sum()
