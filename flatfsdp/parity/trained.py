"""What a training run measures, and whom it tells meanwhile.

In:   nothing.
Out:  a `Trained`, which both loops return.
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
    """What one step measured.

    Attributes:
        loss: mean over microbatches and ranks, the exact FP32 value, the same on every rank.
        grad_norm: norm of the whole reduced gradient before clipping.
        ms: wall time, without data loading and without the `after_backward` hook.
    """

    loss: float
    grad_norm: float
    ms: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run.

    Attributes:
        local_losses: FP32 [steps, microbatches] on the CPU, of this rank alone.
        bytes_per_parameter: the model's byte ledger for the last step.
        model: whose parameters are this rank's flat shards.
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
"""Called with the loss and with tokens per second of all ranks after every step."""

AfterBackward = Callable[[int, nn.Module], None]
"""Called with (step, model) when the reduced gradients of a step are there, before they are clipped."""


def ignore(*_: object) -> None:
    """An `OnStep` and `AfterBackward` that does nothing."""


def require_positive(settings: Any) -> None:
    """Checks the sizes and rates that all settings have.

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
    """Seconds, after everything issued so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def mean_over_ranks(losses_m: Tensor, world: int) -> float:
    """The mean of [world, microbatches] losses, added up in one fixed order on every rank.

    Gathered and not all-reduced, whose order of additions belongs to the backend.
    """
    gathered = [torch.empty_like(losses_m) for _ in range(world)]
    dist.all_gather(gathered, losses_m)
    return float(torch.stack(gathered).cpu().mean())
