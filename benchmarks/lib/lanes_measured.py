"""Times of lanes and of NCCL's own order by turns, for `lanes.py`: reductions alone, and whole steps.

In:   a `Job`, on every rank.
Out:  a `Row` for each case, the same on all ranks; times are those of the slowest rank.
Next: `lanes.py` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
import flatfsdp.optim
from flatfsdp import Precision, by_class, microbatches, replayed
from flatfsdp.comm.collectives import exchange_rows, reduce_scatter
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.whole.units import distinct_units
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.kernels.grad.add_rows import add_rows
from flatfsdp.layers import Embedding, TransformerLayer
from lib.common import progress_bar
from lib.device import free_memory, timed
from lib.engines import TrainedLlama
from lib.fp8_llama import FusedLlama
from lib.llama import SHAPES, Llama, LlamaConfig
from lib.measuring import LEARNING_RATE, SEED

WIRES = {"FP32": torch.float32, "bf16": torch.bfloat16}
"""What gradients are sent in."""

CALLS = 10
"""Reductions in a row that are timed together."""


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


def _by_turns(rank: Rank, job: Job, both: Sequence[Callable[[], object]], steps: int) -> list[list[float]]:
    """Milliseconds of one step of each, one a round; who begins changes from round to round."""
    times: list[list[float]] = [[], []]
    for turn in range(1 + job.rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            found = sum(timed(both[index], steps, rank.device)) / steps
            # The first round warms up.
            if turn:
                times[index].append(found)
    slowest = torch.tensor(times, dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found_by_all: list[list[float]] = slowest.tolist()
    return found_by_all


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
    ms, lanes_ms = _by_turns(rank, job, (library, lanes), CALLS)
    nbytes = numel * dtype.itemsize * (rank.world - 1) // rank.world
    return Row(f"gradient, {size >> 20} MiB", wire, ms, lanes_ms, nbytes)


def _steps(rank: Rank, job: Job, shape: str, wire: str) -> Iterator[Row]:
    """Whole steps of two models, one of which has lanes, for each number of microbatches."""
    sizes = SHAPES[shape]
    config = replace(sizes, layers=job.layers or sizes.layers)
    models = [_model(rank, config, lanes, wire) for lanes in (None, rank.world)]
    optimizers = [flatfsdp.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in models]
    batches = TrainedLlama(shape, own_adamw=True).batches(rank, max(job.microbatches))
    for count in job.microbatches:
        losses: list[Tensor] = []
        steps = []
        for model, optimizer, divisor in zip(models, optimizers, (count, count * rank.world), strict=True):
            steps.append(_step(model, optimizer, batches[:count], divisor, losses, replays=job.replays))
        # Eager microbatches, and those that record.
        for step in steps * (4 if job.replays else 1):
            step()
        sent = [_bytes_of_step(*pair) for pair in zip(models, steps, strict=True)]
        ms, lanes_ms = _by_turns(rank, job, steps, job.steps)
        if not torch.stack(losses).isfinite().all():
            raise RuntimeError("a loss is not finite; times of such steps mean nothing")
        # Of each gradient a rank keeps its own part, as long as its master shard.
        shards = [group.master.flat for unit in distinct_units(models[1]) for group in unit.fsdp_state.groups]
        expected = sum(map(Tensor.numel, shards)) * WIRES[wire].itemsize * (rank.world - 1)
        if sent != [expected, expected]:
            raise RuntimeError(f"gradients of {sent} bytes are sent a step, where it should be {expected}")
        name = f"{shape}, {config.layers} layers, M = {count}" + (", replayed" if job.replays else "")
        yield Row(name, wire, ms, lanes_ms, expected)


def _model(rank: Rank, config: LlamaConfig, lanes: int | None, wire: str) -> nn.Module:
    """The model in FP8, with delayed scaling, and weights stored in FP8."""
    torch.manual_seed(SEED)
    with rank.device:
        plain = Llama(config)
    return flatfsdp.shard(
        FusedLlama(plain, DelayedScaling(amax_history_len=16)),
        by_class(TransformerLayer, Embedding),
        device=rank.device,
        precision=Precision(
            compute=torch.bfloat16, reduce=WIRES[wire], fp8_weights=CurrentScaling(), accumulate=torch.float32
        ),
        reshard_after_forward=False,
        optimize_backward_concat=True,
        lanes=lanes,
    )


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, ...]],
    divisor: int,
    losses: list[Tensor],
    *,
    replays: bool,
) -> Callable[[], None]:
    def microbatch(*batch: Tensor) -> Tensor:
        loss = model(*batch) / divisor
        loss.backward()
        return loss.detach()

    run = replayed(model, microbatch) if replays else microbatch

    def step() -> None:
        for batch in microbatches(model, batches):
            losses.append(run(*batch))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bytes_of_step(model: nn.Module, step: Callable[[], None]) -> int:
    """Bytes of gradients that this rank sends in one step, by the engine's ledger."""
    root, *_ = distinct_units(model)
    ledger = root.fsdp_state.shared.ledger
    ledger.reset()
    step()
    return ledger.bytes["reduce"]
