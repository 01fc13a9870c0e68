"""The one training loop of the command line: build, wrap, and run steps of several microbatches.

In:   `TrainSettings`, a `Sampler` and a `Rank`.
Out:  a `Trained`: what every step measured, and the model and the optimizer as they ended.
Next: `verify.py` compares two of them bit for bit, `train.py` reports one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.cli.progress import StepBar
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe, autocast
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.launch import Rank
from flatfsdp.layers import TransformerLayer
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.models.fused_gpt import FusedGPT
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus


class PrecisionName(str, Enum):
    """The compute dtype; parameters, accumulation and reduction are always FP32.

    The first two are plain PyTorch layers, the others FlatFSDP's own.  With fp8_weights the flat buffers hold
    weights in FP8; with the other FP8 ones each layer casts its own.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_fused = "bf16-fused"
    fp8_delayed = "fp8-delayed"
    fp8_current = "fp8-current"
    fp8_weights = "fp8-weights"

    @property
    def compute(self) -> torch.dtype:
        return torch.float32 if self is PrecisionName.fp32 else torch.bfloat16

    @property
    def has_own_layers(self) -> bool:
        return self not in (PrecisionName.fp32, PrecisionName.bf16)

    @property
    def recipe(self) -> Recipe | None:
        """How to scale; None without FP8."""
        if self is PrecisionName.fp8_delayed:
            return DelayedScaling(amax_history_len=16)
        return CurrentScaling() if self in (PrecisionName.fp8_current, PrecisionName.fp8_weights) else None


class Fusion(str, Enum):
    """How FlatFSDP's own layers accumulate weight gradients.

    off: autograd hands them over, rounded to the compute dtype; two_pass: an FP32 product, then an addition;
    fused: in the product itself.
    """

    off = "off"
    two_pass = "two-pass"
    fused = "fused"

    @property
    def option(self) -> FuseWgrad:
        return "two_pass" if self is Fusion.two_pass else self is Fusion.fused


class Strategy(str, Enum):
    """What is sharded: nothing (dp), gradients and optimizer (zero2), or the parameters as well (zero3)."""

    dp = "dp"
    zero2 = "zero2"
    zero3 = "zero3"


def require_positive(settings: Any) -> None:
    """
    Raises:
        ValueError: if one of the sizes and rates that all training has is not.
    """
    for name in ("batch", "microbatches", "steps"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least 1")
    for name in ("lr", "clip"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be above 0")


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides a run's numbers, but for the number of ranks.

    Attributes:
        fusion: only with FlatFSDP's own layers.
        caches_weights: FP8 weights are cast in the first microbatch of a step only.
        stores_fp8: with fp8_weights, whether the flat buffers really are FP8, or packed as if they were.
        batch: sequences in one microbatch of one rank.
        microbatches: forwards and backwards before one optimizer step.
        decays: the learning rate falls linearly, to zero after the last step.
        clip: largest norm of the gradient of one step.
        data: file or folder with the text; None means the standard library.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    precision: PrecisionName = PrecisionName.fp32
    strategy: Strategy = Strategy.zero3
    optimize_backward_concat: bool = True
    fusion: Fusion = Fusion.fused
    caches_weights: bool = True
    stores_fp8: bool = True
    batch: int = 4
    microbatches: int = 4
    steps: int = 20
    lr: float = 3e-3
    decays: bool = False
    clip: float = 1.0
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self)
        sizes = (self.model.hidden, self.batch * self.model.seq)
        if self.precision.recipe is not None and any(size % ALIGNMENT for size in sizes):
            raise ValueError(
                f"hidden is {sizes[0]} and batch * seq {sizes[1]}; FP8 products need multiples of {ALIGNMENT}"
            )

    @property
    def label(self) -> str:
        flag = "on" if self.optimize_backward_concat else "off"
        return f"{self.precision.value} {self.strategy.value} flag {flag}"

    @property
    def dtypes(self) -> Precision:
        """Of the stations of a parameter."""
        compute = self.precision.compute
        if self.precision is not PrecisionName.fp8_weights:
            return Precision(compute=compute)
        return Precision(compute=compute, fp8_weights=CurrentScaling() if self.stores_fp8 else "in_layers")

    @property
    def unit(self) -> type[nn.Module]:
        """The layer that is one unit."""
        return TransformerLayer if self.precision.has_own_layers else Block

    def build(self) -> nn.Module:
        if self.precision.has_own_layers:
            return FusedGPT(self.model, self.seed, self.fusion.option)
        return GPT(self.model, self.seed)

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)


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
        return [step.loss for step in self.steps]

    def ms(self) -> float:
        """Median time of a step; the first one allocates and records the order of the units."""
        return statistics.median([step.ms for step in self.steps[1:] or self.steps])


AfterBackward = Callable[[int, nn.Module], None]
"""Called with (step, model) when the reduced gradients of a step are there, before they are clipped."""


def train(
    settings: TrainSettings, sampler: Sampler, rank: Rank, after_backward: AfterBackward | None = None
) -> Trained:
    """Trains a fresh model; the same arguments give the same bits wherever the kernels are deterministic."""
    model = auto_wrap(
        settings.build(),
        by_class(settings.unit),
        device=rank.device,
        precision=settings.dtypes,
        reshard_after_forward=settings.strategy is Strategy.zero3,
        shard=settings.strategy is not Strategy.dp,
        optimize_backward_concat=settings.optimize_backward_concat,
    )
    # No weight decay: a flat shard holds matrices and norms alike, and the norms should not decay.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    steps: list[Step] = []
    local_losses = torch.empty(settings.steps, settings.microbatches)
    tokens = rank.world * settings.microbatches * settings.batch * settings.model.seq
    with StepBar(settings.label, settings.steps, visible=rank.index == 0) as bar:
        for index in range(settings.steps):
            batches = [
                tuple(tensor.to(rank.device) for tensor in sampler.sample(index, microbatch, rank.index))
                for microbatch in range(settings.microbatches)
            ]
            model.ledger.reset()
            start = now(rank.device)
            with autocast(settings.precision.recipe is not None, recipe=settings.precision.recipe):
                losses_m = _forward_backward(model, batches, settings)
            reduced = resumed = now(rank.device)
            if after_backward is not None:
                after_backward(index, model)
                resumed = now(rank.device)
            norm = model.clip_grad_norm_(settings.clip)
            if settings.decays:
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * (1 - index / settings.steps)
            optimizer.step()
            optimizer.zero_grad()
            ms = 1e3 * (now(rank.device) - resumed + reduced - start)
            local_losses[index] = losses_m.cpu()
            steps.append(Step(_mean_over_ranks(losses_m, rank.world), float(norm), ms))
            bar.advance(steps[-1].loss, tokens / ms * 1e3)
    return Trained(steps, local_losses, model.ledger.bytes_per_parameter(), model, optimizer)


def _forward_backward(model: FlatFSDP, batches: list[tuple[Tensor, ...]], settings: TrainSettings) -> Tensor:
    """One step's forwards and backwards; returns the losses, FP32 [microbatches]."""
    losses = []
    is_cached = settings.precision.recipe is not None and settings.caches_weights
    for tokens_bt, targets_bt in microbatches(model, batches):
        position = {"is_first_microbatch": model.microbatch.is_first} if is_cached else {}
        loss = model(tokens_bt, targets_bt, **position)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _mean_over_ranks(losses_m: Tensor, world: int) -> float:
    """The mean of [world, microbatches] losses, added up in one fixed order on every rank.

    Gathered and not all-reduced, whose order of additions belongs to the backend.
    """
    gathered = [torch.empty_like(losses_m) for _ in range(world)]
    dist.all_gather(gathered, losses_m)
    return float(torch.stack(gathered).cpu().mean())


def now(device: torch.device) -> float:
    """Seconds, after everything issued so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
