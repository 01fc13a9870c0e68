"""The training loop: steps of several microbatches of a model, however it is sharded.

In:   a function that makes a `Trainee`, and a `Sharding`.
Out:  a `Trained`: measurements of every step, and the model and the optimizer at the end.
Next: `evidence.py` compares what two of them leave behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.launch import Rank
from flatfsdp.flat.nested import map_tensors
from flatfsdp.parity.switches import Sharding

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
        numbers: with lanes, the microbatches of the losses among those of all ranks.
    """

    summary: RunSummary
    local_losses: Tensor
    model: nn.Module
    optimizer: torch.optim.Optimizer
    numbers: Sequence[int] = ()


OnStep = Callable[[float], None]
"""Callback with the loss of a step, after every step."""

AfterBackward = Callable[[int, "Trainee"], None]
"""Callback with the number of a step, when a step's gradients are reduced and not yet clipped."""


def ignore(*_: object) -> None:
    """An `OnStep` and `AfterBackward` that does nothing."""


def unchanged(step: int, batches: list[Any]) -> list[Any]:
    """A `before_step` that does nothing."""
    return batches


@dataclass(frozen=True, eq=False)
class Trainee:
    """A fresh model, ready for its first step.

    Attributes:
        model: this rank's part of the model.
        roots: the sharded modules in it: itself, or the stages of a pipeline.
        steps: number of optimizer steps.
        microbatches: number of microbatches in a step.
        batches: batches of this rank, one for each microbatch of each step.
        forward_backward: function that runs the microbatches of a step and reduces gradients; returns their
            losses, 0-dim each, or none on a rank that has none.
        update: function that clips gradients, updates parameters, and returns the norm before clipping.
        with_losses: ranks of the losses that count; default: all.
        numbers: with lanes, this rank's microbatches among those of all ranks in a step.
        before_step: function of a step and its batches that returns the batches to train on.
        at_end: called after the last step.
    """

    model: nn.Module
    roots: Sequence[Any]
    optimizer: torch.optim.Optimizer
    steps: int
    microbatches: int
    batches: Iterable[Any]
    forward_backward: Callable[[list[Any]], list[Tensor]]
    update: Callable[[], Tensor]
    with_losses: list[int] | slice = field(default_factory=lambda: slice(None))
    numbers: Sequence[int] = ()
    before_step: Callable[[int, list[Any]], list[Any]] = unchanged
    at_end: Callable[[], None] = ignore


MakeTrainee = Callable[[Sharding, Rank], Trainee]
"""Function that builds a model and shards it.  Collective."""


def train(
    make: MakeTrainee,
    sharding: Sharding,
    rank: Rank,
    on_step: OnStep = ignore,
    after_backward: AfterBackward = ignore,
) -> Trained:
    """Trains a fresh model; equal arguments give equal bits if the kernels are deterministic.

    Raises:
        ValueError: if there are too few batches, or no loss.
        RuntimeError: if microbatches should have been replayed on a GPU, and none was.
    """
    trainee = make(sharding, rank)
    count = trainee.microbatches
    ledgers = [root.fsdp_state.shared.ledger for root in trainee.roots]
    losses, norms, times, local_losses = [], [], [], []
    to_device = methodcaller("to", rank.device)
    batches = iter(trainee.batches)
    for step in range(trainee.steps):
        of_step = [map_tensors(to_device, batch) for batch in islice(batches, count)]
        if len(of_step) < count:
            raise ValueError(
                f"batches ended in step {step} on rank {rank.index}; there must be {trainee.steps * count}"
            )
        of_step = trainee.before_step(step, of_step)
        for ledger in ledgers:
            ledger.reset()
        start = _now(rank.device)
        found = trainee.forward_backward(of_step)
        losses_m = torch.stack(found).float() if found else torch.empty(0, device=rank.device)
        reduced = _now(rank.device)
        after_backward(step, trainee)
        resumed = _now(rank.device)
        norms.append(float(trainee.update()))
        trainee.optimizer.zero_grad()
        times.append(1e3 * (_now(rank.device) - resumed + reduced - start))
        local_losses.append(losses_m.cpu())
        sent = losses_m if found else torch.zeros(count, device=rank.device)
        losses.append(_mean(sent, rank, trainee))
        on_step(losses[-1])
    trainee.at_end()
    kinds = dict.fromkeys(kind for ledger in ledgers for kind in ledger.bytes)
    parameters = max(sum(ledger.parameters for ledger in ledgers), 1)
    moved = {kind: sum(ledger.bytes[kind] for ledger in ledgers) / parameters for kind in kinds}
    # The first step allocates and records the order of the units.
    ms = statistics.median(times[1:] or times)
    copied = sum(moved.get(name, 0.0) for name in LOCAL_COPIES)
    summary = RunSummary(losses, norms, losses[-1].hex(), ms, moved, copied)
    return Trained(summary, torch.stack(local_losses), trainee.model, trainee.optimizer, trainee.numbers)


def _now(device: torch.device) -> float:
    """Time in seconds, after everything launched so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _mean(losses_m: Tensor, rank: Rank, trainee: Trainee) -> float:
    """Mean of the losses that count, added up in one fixed order on every rank.

    Losses are gathered, not all-reduced, because the backend would choose the order of additions.
    """
    if trainee.numbers:
        # In the order of all ranks' microbatches, which any number of ranks can tell.
        placed = losses_m.new_zeros(rank.world * len(losses_m))
        placed[list(trainee.numbers)] = losses_m
        losses_m = placed
    gathered = [torch.empty_like(losses_m) for _ in range(rank.world)]
    dist.all_gather(gathered, losses_m, group=rank.group)
    found = torch.stack(gathered).cpu()[trainee.with_losses]
    return float((found.sum(0) if trainee.numbers else found).mean())
