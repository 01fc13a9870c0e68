"""Trains a GPT over data-parallel ranks: build, wrap, and run steps of several microbatches.

In:   `TrainSettings`, a `Sampler` and a `Rank`.
Out:  a `Trained`: measurements of every step, and the model and the optimizer at the end.
Next: `cli/verify.py` compares two of them bit for bit, `cli/train.py` reports one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import Precision, auto_wrap, by_class, microbatches, replayed, shard
from flatfsdp.comm.launch import Rank
from flatfsdp.fp8 import autocast
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import TransformerLayer
from flatfsdp.models.fused_gpt import FusedGPT
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.parity.trained import (
    AfterBackward,
    OnStep,
    Step,
    Trained,
    ignore,
    mean_over_ranks,
    now,
    require_positive,
)
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.interruptions import Interruptions


@dataclass(frozen=True)
class TrainSettings:
    """Settings that determine a run's numbers, apart from the number of ranks.

    Attributes:
        fusion: accumulation of weight gradients; only for FlatFSDP's own layers.
        caches_weights: cast FP8 weights in the first microbatch of a step only.
        stores_fp8: with fp8_weights, whether flat buffers really are FP8, or only packed as if they were.
        in_place: shard the model in place instead of wrapping it.
        replays: run microbatches as CUDA graphs, by `flatfsdp.replayed`; on CPUs they are eager.
        interrupts: do other things between steps, see `Interruptions`.
        batch: number of sequences in one microbatch of one rank.
        microbatches: number of forwards and backwards before an optimizer step.
        decays: lower the learning rate linearly, to zero after the last step.
        warm_up: number of steps in which it rises linearly before that; only with `decays`.
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
    in_place: bool = False
    replays: bool = False
    interrupts: bool = False
    batch: int = 4
    microbatches: int = 4
    steps: int = 20
    lr: float = 3e-3
    decays: bool = False
    warm_up: int = 0
    clip: float = 1.0
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self)
        sizes = (self.model.hidden, self.batch * self.model.seq)
        # Interruptions halve microbatches.
        least = (sizes[0], sizes[1] // 2 if self.interrupts else sizes[1])
        if self.precision.recipe is not None and any(size % ALIGNMENT for size in least):
            raise ValueError(
                f"hidden is {sizes[0]} and batch * seq {sizes[1]}; FP8 GEMMs need multiples of {ALIGNMENT}"
                f"{', also of half of the tokens' if self.interrupts else ''}"
            )
        if self.replays and self.caches_weights and self.precision.recipe is not None:
            raise ValueError(
                "FP8 weights that are cached for a step cannot be replayed: caches_weights=False"
            )

    @property
    def label(self) -> str:
        """The settings in a few words."""
        flag = "on" if self.optimize_backward_concat else "off"
        where, how = " in place" if self.in_place else "", " replayed" if self.replays else ""
        return f"{self.precision.value} {self.strategy.value} flag {flag}{where}{how}"

    @property
    def dtypes(self) -> Precision:
        """Dtypes of parameters, compute, gradients and buffers."""
        dtypes = self.precision.dtypes()
        is_packed_only = dtypes.fp8_weights is not None and not self.stores_fp8
        return replace(dtypes, fp8_weights="in_layers") if is_packed_only else dtypes

    @property
    def unit(self) -> type[nn.Module]:
        """The layer that is one unit."""
        return TransformerLayer if self.precision.has_own_layers else Block

    def build(self) -> nn.Module:
        """A new model with these settings."""
        if self.precision.has_own_layers:
            return FusedGPT(self.model, self.seed, self.fusion.option)
        return GPT(self.model, self.seed)

    def loss(self, model: Any, tokens_bt: Tensor, targets_bt: Tensor, **position: bool) -> Tensor:
        """The model's mean loss; `position` is `is_first_microbatch`, if FP8 weights are cached."""
        return model(tokens_bt, targets_bt, **position)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, if it decays."""
        rises = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        return self.lr * rises * (1 - step / self.steps)

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)


def train(
    settings: TrainSettings,
    sampler: Sampler,
    rank: Rank,
    on_step: OnStep = ignore,
    after_backward: AfterBackward = ignore,
) -> Trained:
    """Trains a fresh model; equal arguments give equal bits if the kernels are deterministic.

    Raises:
        RuntimeError: if microbatches should have been replayed on a GPU, and none was.
    """
    model = _sharded(settings, rank.device)
    # No weight decay: a flat shard holds matrices and norms alike, and norms should not decay.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    run = _Microbatches(model, settings)
    interruptions = Interruptions(model, optimizer, run, partial(settings.loss, model), run.region)
    steps: list[Step] = []
    local_losses = torch.empty(settings.steps, settings.microbatches)
    tokens = rank.world * settings.microbatches * settings.batch * settings.model.seq
    for index in range(settings.steps):
        batches = [
            tuple(tensor.to(rank.device) for tensor in sampler.sample(index, microbatch, rank.index))
            for microbatch in range(settings.microbatches)
        ]
        if settings.interrupts:
            batches = interruptions.before(index, batches)
        model.fsdp_state.shared.ledger.reset()
        start = now(rank.device)
        with run.region():
            losses_m = torch.stack([run(*batch) for batch in microbatches(model, batches)])
        reduced = now(rank.device)
        after_backward(index, model)
        resumed = now(rank.device)
        norm = model.clip_grad_norm_(settings.clip)
        if settings.decays:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(index)
        optimizer.step()
        optimizer.zero_grad()
        ms = 1e3 * (now(rank.device) - resumed + reduced - start)
        local_losses[index] = losses_m.cpu()
        steps.append(Step(mean_over_ranks(losses_m, rank.world), float(norm), ms))
        on_step(steps[-1].loss, tokens / ms * 1e3)
    run.require_replays(rank.device)
    return Trained(
        steps, local_losses, model.fsdp_state.shared.ledger.bytes_per_parameter(), model, optimizer
    )


def _sharded(settings: TrainSettings, device: torch.device) -> Any:
    share = shard if settings.in_place else auto_wrap
    replicates = settings.strategy is Strategy.dp and dist.is_initialized()
    return share(
        settings.build(),
        by_class(settings.unit),
        device=device,
        precision=settings.dtypes,
        reshard_after_forward=settings.strategy is Strategy.zero3,
        mesh=init_device_mesh(device.type, (dist.get_world_size(), 1)) if replicates else None,
        optimize_backward_concat=settings.optimize_backward_concat,
    )


class _Microbatches:
    """Runs forward and backward of a microbatch; a step calls it once for each."""

    def __init__(self, model: Any, settings: TrainSettings) -> None:
        self._model, self._settings = model, settings
        self._is_cached = settings.precision.recipe is not None and settings.caches_weights
        self._replayed = replayed(model, self._run) if settings.replays else None

    def region(self) -> AbstractContextManager[None]:
        """Autocast context around a step."""
        recipe = self._settings.precision.recipe
        return autocast(recipe is not None, recipe=recipe)

    def __call__(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Runs forward and backward; returns the loss, FP32, 0-dim."""
        return (self._replayed or self._run)(tokens_bt, targets_bt)

    def _run(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        is_first = self._model.fsdp_state.shared.microbatch.is_first
        position = {"is_first_microbatch": is_first} if self._is_cached else {}
        loss = self._settings.loss(self._model, tokens_bt, targets_bt, **position)
        (loss / self._settings.microbatches).backward()
        return loss.detach()

    def require_replays(self, device: torch.device) -> None:
        """Raises RuntimeError if microbatches should have been replayed, and none was."""
        if self._replayed is not None and device.type == "cuda" and not self._replayed.replays:
            raise RuntimeError(
                f"none of the microbatches of {self._settings.steps} steps was replayed: the log says why, "
                "or they are too few (two of each kind are eager, and one is recorded)"
            )
