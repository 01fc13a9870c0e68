"""Two ways to reduce gradients by turns in one run, on a Llama with FP8 layers and FP8 weights.

In:   two functions that each run a step, or a reduction.
Out:  milliseconds of each, one a round, on the slowest rank.
Next: `lanes_measured.py` and `grad_sync_measured.py` say which.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp
from flatfsdp import Precision, by_class, microbatches, replayed
from flatfsdp.comm.launch import Rank
from flatfsdp.engine.whole.units import distinct_units
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import Embedding, TransformerLayer
from lib.device import timed
from lib.fp8_llama import FusedLlama
from lib.llama import Llama, LlamaConfig
from lib.measuring import SEED

WIRES = {"FP32": torch.float32, "bf16": torch.bfloat16}
"""What gradients are sent in."""


def by_turns(rank: Rank, both: Sequence[Callable[[], object]], steps: int, rounds: int) -> list[list[float]]:
    """Milliseconds of one step of each, one a round; who begins changes from round to round.

    Args:
        rank: this rank.
        both: run a step each.
        steps: steps in a row that are timed together.
        rounds: number of rounds, after one that warms up.
    """
    times: list[list[float]] = [[], []]
    for turn in range(1 + rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            found = sum(timed(both[index], steps, rank.device)) / steps
            if turn:
                times[index].append(found)
    return largest(times, rank)


def ratios(usual: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times as long the other way takes: median and range over the rounds."""
    found = [of_other / of_usual for of_usual, of_other in zip(usual, other, strict=True)]
    return {"ratio": statistics.median(found), "least_ratio": min(found), "greatest_ratio": max(found)}


def require_finite(losses: Sequence[Tensor]) -> None:
    """Raises RuntimeError if a loss is not finite: times of such steps mean nothing."""
    if not torch.stack([*losses]).isfinite().all():
        raise RuntimeError("a loss is not finite; times of such steps mean nothing")


def largest(numbers: Any, rank: Rank) -> Any:
    """The largest of all ranks, number by number."""
    found = torch.tensor(numbers, dtype=torch.float64, device=rank.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def fp8_llama(
    rank: Rank, config: LlamaConfig, wire: torch.dtype, *, reshard: bool = False, **options: Any
) -> nn.Module:
    """A sharded Llama with FP8 layers, delayed scaling, and weights stored in FP8.

    Args:
        rank: this rank.
        config: its sizes.
        wire: what gradients are sent in.
        reshard: ZeRO-3; otherwise ZeRO-2.
        options: further ones of `flatfsdp.shard`.
    """
    torch.manual_seed(SEED)
    with rank.device:
        plain = Llama(config)
    return flatfsdp.shard(
        FusedLlama(plain, DelayedScaling(amax_history_len=16)),
        by_class(TransformerLayer, Embedding),
        device=rank.device,
        precision=Precision(compute=torch.bfloat16, reduce=wire, fp8_weights=CurrentScaling()),
        reshard_after_forward=reshard,
        optimize_backward_concat=True,
        **options,
    )


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, ...]],
    divisor: int,
    losses: list[Tensor],
    *,
    replays: bool,
) -> Callable[[], None]:
    """Makes a function that runs a step, and adds its losses to a list.

    Args:
        model: the sharded model.
        optimizer: its optimizer.
        batches: the microbatches.
        divisor: what each loss is divided by.
        losses: gets them.
        replays: run microbatches as CUDA graphs.
    """

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


def bytes_sent(model: nn.Module, step: Callable[[], None]) -> int:
    """Bytes of gradients that this rank sends in one step, by the engine's ledger."""
    root, *_ = distinct_units(model)
    ledger = root.fsdp_state.shared.ledger
    ledger.reset()
    step()
    return ledger.bytes["reduce"]


def elements_sent(model: nn.Module, rank: Rank) -> int:
    """Elements of gradients that a rank sends in one reduction of all: of each it keeps a part itself."""
    shards = [group.master.flat for unit in distinct_units(model) for group in unit.fsdp_state.groups]
    return sum(map(Tensor.numel, shards)) * (rank.world - 1)
