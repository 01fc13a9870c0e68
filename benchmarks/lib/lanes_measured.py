"""Times of lanes and of NCCL's own order by turns, for `lanes.py`: reductions alone, and whole steps.

In:   a `Job`, on every rank.
Out:  a `Row` for each case, the same on all ranks; times are those of the slowest rank.
Next: `lanes.py` shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

import flatfsdp.optim
from flatfsdp.comm.collectives import exchange_rows, reduce_scatter
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.ranks import Ranks
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT
from flatfsdp.kernels.grad.add_rows import add_rows
from lib.common import progress_bar
from lib.device import free_memory, in_a_row
from lib.engines import TrainedLlama
from lib.llama import SHAPES
from lib.measuring import LEARNING_RATE, SEED
from lib.reducing import WIRES, by_turns, bytes_sent, elements_sent, fp8_llama, require_finite, step_of

CALLS = 10
"""Reductions in a row that are timed together, on a GPU as one CUDA graph."""


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        sizes: bytes of the FP32 gradients that are reduced alone.
        shapes: keys of `SHAPES`.
        layers: number of layers of each shape; None leaves it.
        microbatches: numbers of microbatches a step, on each rank.
        replays: run microbatches as CUDA graphs.
        rounds: times that everything is measured, by turns.
        steps: steps in a row that are timed in each round.
    """

    sizes: tuple[int, ...]
    shapes: tuple[str, ...]
    layers: int | None
    microbatches: tuple[int, ...]
    replays: bool
    rounds: int
    steps: int


@dataclass(frozen=True)
class Row:
    """One case, with lanes and without.

    Attributes:
        case: size of a gradient, or shape of a model with its number of microbatches.
        wire: what is sent in.
        ms: milliseconds without lanes, one a round: NCCL's reduce-scatter, or a step with it.
        lanes_ms: milliseconds with lanes.
        bytes: bytes that each rank sends a reduction, or a step, by the engine's ledger; equal for both.
    """

    case: str
    wire: str
    ms: list[float]
    lanes_ms: list[float]
    bytes: int


def measure_all(rank: Rank, job: Job) -> list[Row]:
    """Measures all cases on all ranks."""
    rows: list[Row] = []
    count = len(WIRES) * (len(job.sizes) + len(job.shapes) * len(job.microbatches))
    with progress_bar(visible=rank.index == 0) as bar:
        task = bar.add_task("", total=count)
        for wire in WIRES:
            for size in job.sizes:
                bar.update(task, description=f"a gradient of {size >> 20} MiB, {wire}")
                rows.append(_reductions(rank, job, size, wire))
                bar.advance(task)
            for shape in job.shapes:
                for row in _steps(rank, job, shape, wire):
                    rows.append(row)
                    bar.update(task, description=f"{row.case}, {wire}", advance=1)
                free_memory(rank.device)
    return rows


def _reductions(rank: Rank, job: Job, size: int, wire: str) -> Row:
    """One gradient, from FP32 on every rank to FP32 sums of the ranks' own shards."""
    ranks, dtype = Ranks.of(dist.group.WORLD), WIRES[wire]
    multiple = rank.world * ELEMENT_ALIGNMENT
    numel = -(-size // (4 * multiple)) * multiple
    torch.manual_seed(SEED + rank.index)
    grad = torch.randn(numel, device=rank.device)
    rows = torch.empty(rank.world - 1, numel // rank.world, dtype=dtype, device=rank.device)
    shard = torch.empty(numel // rank.world, dtype=dtype, device=rank.device)
    wide = shard.float()
    parts, own = grad.view(rank.world, -1), rank.index

    def library() -> None:
        reduce_scatter(shard, grad.to(dtype), ranks, mean=True)
        if dtype is not torch.float32:
            wide.copy_(shard)

    def lanes() -> None:
        slices = (part for part in (parts[:own], parts[own + 1 :]) if len(part))
        exchange_rows(rows, [row for part in slices for row in part.to(dtype)], ranks)
        add_rows(wide, rows, parts[own], own, first=True)

    lanes()
    others = [torch.empty_like(grad) for _ in range(rank.world)]
    dist.all_gather(others, grad)
    expected, *addends = (other.view(rank.world, -1)[own].to(dtype).float() for other in others)
    for addend in addends:
        expected += addend
    if not torch.equal(wide, expected):
        raise RuntimeError("the sum of the rows is not the one in the order of lanes")
    del others, expected, addends
    # As CUDA graphs: a slow host launches a reduction from Python no faster than a GPU runs it, in 300 us.
    repeated = [in_a_row(call, CALLS, rank.device) for call in (library, lanes)]
    of_calls, of_calls_lanes = by_turns(rank, repeated, 1, job.rounds)
    ms, lanes_ms = [[each / CALLS for each in found] for found in (of_calls, of_calls_lanes)]
    nbytes = numel * dtype.itemsize * (rank.world - 1) // rank.world
    return Row(f"gradient, {size >> 20} MiB", wire, ms, lanes_ms, nbytes)


def _steps(rank: Rank, job: Job, shape: str, wire: str) -> Iterator[Row]:
    """Whole steps of two models, one of which has lanes, for each number of microbatches."""
    sizes = SHAPES[shape]
    config = replace(sizes, layers=job.layers or sizes.layers)
    models = [fp8_llama(rank, config, WIRES[wire], lanes=lanes) for lanes in (None, rank.world)]
    optimizers = [flatfsdp.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in models]
    batches = TrainedLlama(shape, own_adamw=True).batches(rank, max(job.microbatches))
    for count in job.microbatches:
        losses: list[Tensor] = []
        steps = []
        for model, optimizer, divisor in zip(models, optimizers, (count, count * rank.world), strict=True):
            steps.append(step_of(model, optimizer, batches[:count], divisor, losses, replays=job.replays))
        # Eager microbatches, and those that record.
        for step in steps * (4 if job.replays else 1):
            step()
        sent = [bytes_sent(*pair) for pair in zip(models, steps, strict=True)]
        ms, lanes_ms = by_turns(rank, steps, job.steps, job.rounds)
        require_finite(losses)
        expected = elements_sent(models[1], rank) * WIRES[wire].itemsize
        if sent != [expected, expected]:
            raise RuntimeError(f"gradients of {sent} bytes are sent a step, where it should be {expected}")
        name = f"{shape}, {config.layers} layers, M = {count}" + (", replayed" if job.replays else "")
        yield Row(name, wire, ms, lanes_ms, expected)
