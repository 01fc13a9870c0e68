"""Times and peaks of `grad_sync="last"` and "every" by turns, for `grad_sync.py`.

In:   a `Job`, on every rank.
Out:  a `Row` for each dtype that gradients are sent in, the same on all ranks.
Next: `grad_sync.py` shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

import flatfsdp.optim
from flatfsdp.comm.launch import Rank
from flatfsdp.engine.whole.units import distinct_units
from lib.common import progress_bar
from lib.device import GIB, free_memory, peak_gib, start_together
from lib.engines import TrainedLlama
from lib.llama import SHAPES, LlamaConfig
from lib.measuring import LEARNING_RATE
from lib.reducing import (
    WIRES,
    by_turns,
    bytes_sent,
    elements_sent,
    fp8_llama,
    largest,
    require_finite,
    step_of,
)


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        shape: key of `SHAPES`.
        layers: number of layers; None leaves the shape's.
        microbatches: number of microbatches a step, on each rank.
        reshard: True for ZeRO-3, False for ZeRO-2.
        replays: run microbatches as CUDA graphs.
        rounds: times that everything is measured, by turns.
        steps: steps in a row that are timed in each round.
    """

    shape: str
    layers: int | None
    microbatches: int
    reshard: bool
    replays: bool
    rounds: int
    steps: int

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the model."""
        sizes = SHAPES[self.shape]
        return replace(sizes, layers=self.layers or sizes.layers)


@dataclass(frozen=True)
class Row:
    """Both ways, with gradients sent in one dtype.

    Attributes:
        wire: that dtype.
        last_ms, every_ms: milliseconds of a step, one a round.
        last_peak_gib, every_peak_gib: peak of memory in a step.
        gradient_gib: the whole gradient in FP32, which "last" keeps on every rank.
        last_bytes, every_bytes: bytes that each rank sends in a step.
    """

    wire: str
    last_ms: list[float]
    every_ms: list[float]
    last_peak_gib: float
    every_peak_gib: float
    gradient_gib: float
    last_bytes: int
    every_bytes: int


def measure_all(rank: Rank, job: Job) -> list[Row]:
    """Measures all dtypes on all ranks."""
    rows = []
    with progress_bar(visible=rank.index == 0) as bar:
        task = bar.add_task(job.shape, total=len(WIRES))
        for wire in WIRES:
            rows.append(_measure(rank, job, wire))
            free_memory(rank.device)
            bar.advance(task)
    return rows


def _measure(rank: Rank, job: Job, wire: str) -> Row:
    losses: list[Tensor] = []
    if job.replays:
        # What recordings keep for good differs, so each way has a model of its own.
        (last, last_step), (every, every_step) = (
            _way(rank, job, wire, sync, losses) for sync in ("last", "every")
        )
    else:
        # Two models of 8B would not fit on two GPUs: one takes turns.
        last, either = _way(rank, job, wire, "last", losses)
        # The first use of the model decides, too.
        either()
        every, last_step, every_step = last, _switched(last, either, False), _switched(last, either, True)
    steps = (last_step, every_step)
    # Eager microbatches, and those that record.
    for step in steps * (4 if job.replays else 1):
        step()
    sent = bytes_sent(last, last_step), bytes_sent(every, every_step)
    expected = elements_sent(last, rank) * WIRES[wire].itemsize
    if sent != (expected, expected * job.microbatches):
        raise RuntimeError(f"gradients of {sent} bytes are sent a step, where {expected} a reduction are due")
    last_ms, every_ms = by_turns(rank, steps, job.steps, job.rounds)
    peaks = []
    for step in steps:
        start_together(rank.device)
        step()
        peaks.append(peak_gib(rank.device))
    require_finite(losses)
    gradient = 4 * elements_sent(last, rank) / (rank.world - 1) * rank.world / GIB
    last_peak, every_peak = largest(peaks, rank)
    return Row(wire, last_ms, every_ms, last_peak, every_peak, gradient, *sent)


def _way(
    rank: Rank, job: Job, wire: str, grad_sync: str, losses: list[Tensor]
) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a function that runs a step of it."""
    model = fp8_llama(rank, job.config, WIRES[wire], reshard=job.reshard, grad_sync=grad_sync)
    optimizer = flatfsdp.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = TrainedLlama(job.shape, own_adamw=True).batches(rank, job.microbatches)
    return model, step_of(model, optimizer, batches, job.microbatches, losses, replays=job.replays)


def _switched(model: nn.Module, step: Callable[[], None], reduces_every: bool) -> Callable[[], None]:
    def switched() -> None:
        for unit in distinct_units(model):
            unit.fsdp_state.shared.reduces_every = reduces_every
        step()

    return switched
