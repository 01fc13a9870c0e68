"""Trains a user's own model for a few steps, sharded in one way.

In:   a function that builds a model, one that yields batches, and a `Sharding`.
Out:  a `Trained`.
Next: `evidence.py` compares what two of them leave behind.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp import FlatFSDP, auto_wrap, microbatches, replayed, shard
from flatfsdp.comm.launch import Rank
from flatfsdp.contract.any_model import Batches, BuildModel, Loss, layers_of, loss_of
from flatfsdp.engine.wrap import WrapPolicy
from flatfsdp.flat.nested import map_tensors
from flatfsdp.fp8 import autocast
from flatfsdp.parity.switches import Sharding, fusing
from flatfsdp.parity.trained import AfterBackward, Step, Trained, mean_over_ranks, now


@dataclass(frozen=True)
class ModelJob:
    """Model, data and settings of a training run.

    Attributes:
        policy: policy that picks units; None takes the items of the outermost lists of modules.
        loss: function of model and batch; None takes the loss that the model returns, see `loss_of`.
        seed: seed of parameters, which all ranks share, and of dropout.
    """

    build_model: BuildModel
    batches: Batches
    policy: WrapPolicy | None = None
    loss: Loss | None = None
    steps: int = 4
    microbatches: int = 2
    lr: float = 1e-3
    max_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def train(job: ModelJob, sharding: Sharding, rank: Rank, after_backward: AfterBackward) -> Trained:
    """Trains a fresh model; equal arguments give equal bits if the kernels are deterministic.

    Raises:
        ValueError: if there are too few batches, or no loss.
    """
    torch.manual_seed(job.seed)
    built = job.build_model()
    if sharding.fuses is not None:
        for layer in fusing(built):
            layer.fuse_wgrad_accumulation = sharding.fuses
    model = _sharded(
        built,
        job.policy or layers_of(built),
        in_place=sharding.in_place,
        device=rank.device,
        precision=sharding.precision,
        reshard_after_forward=sharding.reshard,
        optimize_backward_concat=sharding.flag,
    )
    torch.manual_seed(job.seed + 1 + rank.index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    loss_of_batch = job.loss or loss_of

    def run(batch: Any) -> Tensor:
        loss = loss_of_batch(model, batch)
        (loss / job.microbatches).backward()
        return loss.detach()

    microbatch = replayed(model, run) if sharding.replays else run
    steps: list[Step] = []
    local_losses = torch.empty(job.steps, job.microbatches)
    batches = iter(job.batches(rank.index, rank.world))
    for index in range(job.steps):
        of_step = [_moved(batch, rank.device) for batch in islice(batches, job.microbatches)]
        if len(of_step) < job.microbatches:
            raise ValueError(
                f"batches ended in step {index} on rank {rank.index}; {job.steps} steps of "
                f"{job.microbatches} microbatches need {job.steps * job.microbatches} of them"
            )
        model.fsdp_state.shared.ledger.reset()
        start = now(rank.device)
        with autocast(recipe=sharding.recipe) if sharding.recipe is not None else nullcontext():
            losses_m = torch.stack([microbatch(batch) for batch in microbatches(model, of_step)]).float()
        after_backward(index, model)
        norm = model.clip_grad_norm_(job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        local_losses[index] = losses_m.cpu()
        mean = mean_over_ranks(losses_m, rank.world)
        steps.append(Step(mean, float(norm), 1e3 * (now(rank.device) - start)))
    return Trained(
        steps, local_losses, model.fsdp_state.shared.ledger.bytes_per_parameter(), model, optimizer
    )


def _sharded(built: nn.Module, policy: WrapPolicy | None, *, in_place: bool, **options: Any) -> Any:
    if in_place:
        return shard(built, policy, **options)
    return FlatFSDP(built, **options) if policy is None else auto_wrap(built, policy, **options)


def _moved(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), batch)
