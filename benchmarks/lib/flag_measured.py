"""Measurements of `flag.py`: steps of one layer with `optimize_backward_concat` off and on.

In:   a `Job`.
Out:  a `Measured` for each case, the same on every rank.
Next: `flag.py` compares them, and draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import Progress, TaskID
from torch import Tensor

import flatfsdp.optim
from flatfsdp import Precision, by_class, microbatches, replayed, shard
from flatfsdp.comm.launch import Rank
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import TransformerLayer
from lib.common import on_all_ranks, progress_bar
from lib.device import GIB, allocated_gib, free_memory, peak_gib, peak_reserved_gib, start_together, timed
from lib.fp8_llama import FusedLlama
from lib.llama import Llama, LlamaConfig
from lib.measuring import LEARNING_RATE, SEED

COMPARED_STEPS, COMPARED_MICROBATCHES = 5, 4
"""The steps whose losses are compared: of CUDA graphs, the last two steps are replayed."""

EAGER_WARMUP, REPLAYED_WARMUP = 2, 4
"""Steps before timed ones; the first microbatch of a step is recorded in the third step."""


class DType(str, Enum):
    """Dtypes of the layer's GEMMs."""

    bf16 = "bf16"
    fp8 = "fp8"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return "bf16" if self is DType.bf16 else "FP8"


class Way(str, Enum):
    """The measured variants; each has what the ones before it have."""

    off = "off"
    on = "on"
    fused = "fused"
    replayed = "replayed"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        labels = {
            Way.off: "flag off",
            Way.on: "flag on",
            Way.fused: "+ fused weight gradients",
            Way.replayed: "+ CUDA graphs (in FP8: and FP8 weights)",
        }
        return labels[self]


class Case(NamedTuple):
    """A size of microbatches, in tokens, and a dtype."""

    tokens: int
    dtype: DType


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        config: sizes of the model.
        microbatches: microbatches of a step, one sequence each.
        steps: timed steps of each variant in each round.
        rounds: number of times that the variants are timed in turn.
    """

    config: LlamaConfig
    cases: tuple[Case, ...]
    microbatches: int
    steps: int
    rounds: int


@dataclass(frozen=True)
class Measured:
    """One variant of a case, over all ranks: the slowest one's times, the highest peak.

    Attributes:
        ms: time of each timed step.
        compared_losses: for each rank, its mean loss of each step that was compared, with deterministic
            kernels.
        last_loss: mean over ranks in the last timed step.
        peak_gib, peak_reserved_gib: most memory allocated, and reserved by PyTorch, in a step, beyond that
            of the other variants; CUDA graphs keep memory that is only reserved.
        eager_microbatches: number of microbatches in timed steps that should have been CUDA graphs and were
            not.
    """

    way: Way
    ms: list[float]
    compared_losses: list[list[float]]
    last_loss: float
    peak_gib: float
    peak_reserved_gib: float
    eager_microbatches: int


def measure_all(rank: Rank, job: Job) -> list[list[Measured] | str]:
    """Measures all variants of each case, or returns its error; all ranks return the same."""
    found: list[list[Measured] | str] = []
    with progress_bar(visible=rank.index == 0) as bar:
        task = bar.add_task("", total=len(job.cases) * len(Way) * (1 + job.rounds))
        for case in job.cases:
            everyones = on_all_ranks(partial(_measure, case, job, rank, bar, task), rank)
            if isinstance(everyones, str):
                found.append(everyones)
            else:
                found.append([_over_ranks(of_way) for of_way in zip(*everyones, strict=True)])
    return found


def _measure(case: Case, job: Job, rank: Rank, bar: Progress, task: TaskID) -> list[Measured]:
    """Builds all variants, which stay until the end, and times them by turns."""
    batches = _batches(case, job, rank)
    trainings = []
    for way in Way:
        bar.update(task, description=f"{case.dtype.label} {case.tokens}: {way.label}")
        trainings.append(_Training(way, case, job.config, rank, batches))
        bar.advance(task)
    for turn in range(job.rounds):
        # In another order each time, as a chip gets hot, and slower.
        for index in range(len(trainings)):
            training = trainings[(index + turn) % len(trainings)]
            bar.update(task, description=f"{case.dtype.label} {case.tokens}: {training.way.label}")
            training.time(job.steps)
            bar.advance(task)
    return [training.measured() for training in trainings]


def _batches(case: Case, job: Job, rank: Rank) -> list[Tensor]:
    generator = torch.Generator(rank.device).manual_seed(SEED + 1 + rank.index)
    shape = (1, case.tokens, job.config.hidden)
    return [
        torch.randn(shape, generator=generator, device=rank.device, dtype=torch.bfloat16)
        for _ in range(job.microbatches)
    ]


class _Training:
    """One variant in training; building it compares its first steps' losses, and warms it up."""

    def __init__(
        self, way: Way, case: Case, config: LlamaConfig, rank: Rank, batches: Sequence[Tensor]
    ) -> None:
        self.way, self._rank, self._batches = way, rank, batches
        free_memory(rank.device)
        allocated, reserved = allocated_gib(rank.device), _reserved_gib(rank.device)
        is_fp8, is_replayed = case.dtype is DType.fp8, way is Way.replayed
        # Weights that layers keep in FP8 between microbatches cannot be in graphs; those in flat buffers can.
        self._is_cached = is_fp8 and not is_replayed
        self._model = _sharded(way, replace(config, seq=case.tokens), is_fp8, rank.device)
        self._optimizer = flatfsdp.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._graphs = replayed(self._model, self._forward_backward) if is_replayed else None
        losses = [self._step(batches[:COMPARED_MICROBATCHES]) for _ in range(COMPARED_STEPS)]
        self._compared_losses = torch.stack(losses).tolist()
        if self._graphs is not None:
            self._graphs.release()
        free_memory(rank.device)
        with _any_kernels():
            for _ in range(REPLAYED_WARMUP if is_replayed else EAGER_WARMUP):
                start_together(rank.device)
                self._step(batches)
        self._peak_gib = peak_gib(rank.device) - allocated
        self._peak_reserved_gib = peak_reserved_gib(rank.device) - reserved
        self._losses: list[Tensor] = []
        self._ms: list[float] = []
        self._replays = -self._replays_so_far()

    def time(self, steps: int) -> None:
        """Times some steps, back to back."""
        with _any_kernels():
            start_together(self._rank.device)
            self._ms += timed(
                lambda: self._losses.append(self._step(self._batches)), steps, self._rank.device
            )

    def measured(self) -> Measured:
        """The figures of this rank.

        Raises:
            FloatingPointError: if a loss is not finite: with NaN a GPU draws less power and runs faster.
        """
        losses = torch.stack(self._losses).tolist()
        if not all(map(math.isfinite, (*self._compared_losses, *losses))):
            raise FloatingPointError(f"{self.way.label}: losses are {self._compared_losses}, then {losses}")
        replays = self._replays + self._replays_so_far()
        expected = 0 if self._graphs is None else len(losses) * len(self._batches)
        return Measured(
            self.way,
            self._ms,
            [self._compared_losses],
            losses[-1],
            self._peak_gib,
            self._peak_reserved_gib,
            expected - replays,
        )

    def _step(self, batches: Sequence[Tensor]) -> Tensor:
        run = self._graphs or self._forward_backward
        losses = [run(x_btc) for x_btc in microbatches(self._model, batches)]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean()

    def _forward_backward(self, x_btc: Tensor) -> Tensor:
        is_first = self._model.fsdp_state.shared.microbatch.is_first if self._is_cached else None
        loss: Tensor = self._model(x_btc, is_first_microbatch=is_first)
        loss.backward()
        return loss.detach()

    def _replays_so_far(self) -> int:
        return 0 if self._graphs is None else self._graphs.replays


def _sharded(way: Way, config: LlamaConfig, is_fp8: bool, device: torch.device) -> Any:
    """The model, the same in all variants, with parameters that stay for a step (ZeRO-2)."""
    torch.manual_seed(SEED)
    with device:
        plain = Llama(config)
    # Each rank scales its own activations, so that no amax is exchanged.
    recipe = DelayedScaling(amax_history_len=16, reduce_amax=False) if is_fp8 else None
    stored = CurrentScaling() if is_fp8 and way is Way.replayed else None
    return shard(
        FusedLlama(plain, recipe, fuses=way in (Way.fused, Way.replayed)),
        by_class(TransformerLayer),
        device=device,
        precision=Precision(compute=torch.bfloat16, fp8_weights=stored),
        reshard_after_forward=False,
        optimize_backward_concat=way is not Way.off,
    )


@contextmanager
def _any_kernels() -> Iterator[None]:
    """Allows the fast kernels of attention, whose backward does not repeat its bits."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def _reserved_gib(device: torch.device) -> float:
    return torch.cuda.memory_reserved() / GIB if device.type == "cuda" else 0.0


def _over_ranks(of_ranks: Sequence[Measured]) -> Measured:
    return Measured(
        of_ranks[0].way,
        [max(step) for step in zip(*(each.ms for each in of_ranks), strict=True)],
        [losses for each in of_ranks for losses in each.compared_losses],
        sum(each.last_loss for each in of_ranks) / len(of_ranks),
        max(each.peak_gib for each in of_ranks),
        max(each.peak_reserved_gib for each in of_ranks),
        max(each.eager_microbatches for each in of_ranks),
    )
