"""`StepInLanes`: a step of a trainer whose model has lanes: its microbatches over all ranks, and their loss.

In:   the lanes, and this rank's place among the ranks.
Out:  numbers of microbatches, and the loss of the step.
Next: `trainer.py` asks it for each step; `compat/samples_in_lanes.py` has dealt out the samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.grid import Grid
from flatfsdp.comm.lanes import Lanes


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
