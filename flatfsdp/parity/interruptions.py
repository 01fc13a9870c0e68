"""Interruptions between steps, as in real trainings, which must not affect the following steps.

In:   a model in training, and a function that runs one microbatch of it.
Out:  the same model, after an evaluation, a failed microbatch, or the load of a state dict.
Next: `any_model.py` does all of these in a run that is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]

EVERY = 4
"""Number of steps from one interruption to the next, which is of another kind."""


@dataclass
class Interruptions:
    """Interrupts a training before each fourth step.

    In turn: an evaluation, a microbatch that raises, a step of shorter microbatches, and a load of the state
    dict from the last evaluation.

    Attributes:
        microbatch: function of a batch, tokens and targets, that runs forward and backward.
        loss: function that computes the loss of a batch, with its graph; used in evaluations.
        region: function that makes the autocast context around these.
        saved: state dict of the last evaluation.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    microbatch: Callable[[Batch], Tensor]
    loss: Callable[[Batch], Tensor]
    region: Callable[[], AbstractContextManager[Any]]
    saved: dict[str, Tensor] = field(default_factory=dict)

    def before(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Interrupts if it is time; returns the step's microbatches."""
        turn, rest = divmod(step, EVERY)
        if rest != EVERY - 1:
            return list(batches)
        kind = turn % 4
        if kind == 0:
            self._evaluate(batches[0])
        elif kind == 1:
            self._fail(batches[0])
        elif kind == 2:
            # Half of the sequences, or half of each sequence.
            return [tuple(_half(tensor) for tensor in batch) for batch in batches]
        else:
            self.model.load_state_dict(self.saved)
        return list(batches)

    def _evaluate(self, batch: Batch) -> None:
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.eval()
        with torch.no_grad(), self.region():
            self.loss(batch)
        self.model.train()

    def _fail(self, batch: Batch) -> None:
        """Runs a microbatch whose targets do not fit, which raises between its forward and its backward."""
        tokens_bt, targets_bt = batch
        try:
            with self.region():
                self.microbatch((tokens_bt, targets_bt[:, 1:].contiguous()))
        except (RuntimeError, ValueError):
            self.optimizer.zero_grad()
            return
        raise AssertionError("targets of another length than the tokens made no error")


def _half(tensor: Tensor) -> Tensor:
    sequences, length = tensor.shape
    return tensor[: sequences // 2] if sequences > 1 else tensor[:, : length // 2].contiguous()
