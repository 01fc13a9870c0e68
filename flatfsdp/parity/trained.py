"""Results of a training run, and the callbacks that it makes.

In:   nothing.
Out:  `Trained`, which all training loops return.
Next: `training/gpt.py`, `training/llama.py` and `any_model.py` fill it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """Measurements of one step.

    Attributes:
        loss: mean over microbatches and ranks: the exact FP32 value, equal on every rank.
        grad_norm: norm of the whole reduced gradient before clipping.
        ms: wall time in milliseconds, without data loading and the `after_backward` hook.
    """

    loss: float
    grad_norm: float
    ms: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run.

    Attributes:
        local_losses: losses of this rank alone, FP32 [steps, microbatches], on the CPU.
        bytes_per_parameter: the model's byte ledger for the last step.
        model: the model, whose parameters are this rank's flat shards.
    """

    steps: list[Step]
    local_losses: Tensor
    bytes_per_parameter: dict[str, float]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def losses(self) -> list[float]:
        """Loss of each step."""
        return [step.loss for step in self.steps]

    def ms(self) -> float:
        """Median time of a step; the first one allocates and records the order of the units."""
        return statistics.median([step.ms for step in self.steps[1:] or self.steps])


OnStep = Callable[[float, float], None]
"""Callback with the loss and the tokens per second of all ranks, after every step."""

AfterBackward = Callable[[int, nn.Module], None]
"""Callback with (step, model), when a step's gradients are reduced and not yet clipped."""


def ignore(*_: object) -> None:
    """An `OnStep` and `AfterBackward` that does nothing."""


def require_positive(settings: Any) -> None:
    """Checks sizes and rates that all settings have.

    Raises:
        ValueError: if one is not positive.
    """
    for name in ("batch", "microbatches", "steps"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least 1")
    for name in ("lr", "clip"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be above 0")


def now(device: torch.device) -> float:
    """Time in seconds, after everything launched so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def mean_over_ranks(losses_m: Tensor, world: int) -> float:
    """Mean of [world, microbatches] losses, added up in one fixed order on every rank.

    Losses are gathered, not all-reduced, because the backend would choose the order of additions.
    """
    gathered = [torch.empty_like(losses_m) for _ in range(world)]
    dist.all_gather(gathered, losses_m)
    return float(torch.stack(gathered).cpu().mean())
