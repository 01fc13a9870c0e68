"""Results of a training run, whole and in the form that reports contain.

In:   nothing.
Out:  `Trained`, which the training loop returns, and its `RunSummary`.
Next: `evidence.py` compares two of them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LOCAL_COPIES = ("cast", "concat", "accumulate")
"""The ledger's counters of bytes that move within one rank's memory; other counters are of traffic."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run, as seen by rank 0.

    Attributes:
        losses: loss of each step, averaged over ranks and microbatches; exact FP32 values.
        grad_norms: norm of the whole reduced gradient of each step, before clipping.
        final_loss_hex: the last loss as `float.hex`, which shows every bit.
        ms: median wall time of a step in milliseconds, without data loading and the `after_backward` hook.
        bytes_per_parameter: the byte ledger of the last step, by kind of traffic.
        local_bytes: sum of those bytes that are copies within a rank.
    """

    losses: list[float]
    grad_norms: list[float]
    final_loss_hex: str
    ms: float
    bytes_per_parameter: dict[str, float]
    local_bytes: float

    @staticmethod
    def of(
        losses: list[float], norms: list[float], times: list[float], bytes_per_parameter: dict[str, float]
    ) -> RunSummary:
        """Summarises measurements of all steps."""
        # The first step allocates and records the order of the units.
        ms = statistics.median(times[1:] or times)
        copied = sum(bytes_per_parameter.get(name, 0.0) for name in LOCAL_COPIES)
        return RunSummary(losses, norms, losses[-1].hex(), ms, bytes_per_parameter, copied)

    @property
    def falling(self) -> bool:
        """Whether the last quarter of the steps has a lower mean loss than the first one."""
        quarter = max(1, len(self.losses) // 4)
        return sum(self.losses[-quarter:]) < sum(self.losses[:quarter])


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run.

    Attributes:
        local_losses: losses of this rank alone, FP32 [steps, microbatches], on the CPU.
        model: the model, whose parameters are this rank's flat shards.
    """

    summary: RunSummary
    local_losses: Tensor
    model: nn.Module
    optimizer: torch.optim.Optimizer
