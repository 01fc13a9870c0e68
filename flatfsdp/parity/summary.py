"""Summary of a run, in the form that reports contain."""

from __future__ import annotations

from dataclasses import dataclass

from flatfsdp.parity.trained import Trained

LOCAL_COPIES = ("cast", "concat", "accumulate")
"""The ledger's counters of bytes that move within one rank's memory; other counters are of traffic."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run, as seen by rank 0.

    Attributes:
        losses: loss of each step, averaged over ranks and microbatches; exact FP32 values.
        final_loss_hex: the last loss as `float.hex`, which shows every bit.
        ms: median time of a step in milliseconds.
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
    def of(trained: Trained) -> RunSummary:
        """The summary of a run."""
        losses, ledger = trained.losses(), trained.bytes_per_parameter
        return RunSummary(
            losses,
            [step.grad_norm for step in trained.steps],
            losses[-1].hex(),
            trained.ms(),
            ledger,
            sum(ledger.get(name, 0.0) for name in LOCAL_COPIES),
        )

    @property
    def falling(self) -> bool:
        """Whether the last quarter of the steps has a lower mean loss than the first one."""
        quarter = max(1, len(self.losses) // 4)
        return sum(self.losses[-quarter:]) < sum(self.losses[:quarter])
