"""Trains a Llama over tensor, pipeline and data parallel ranks.

In:   `ParallelSettings`, a `Sampler` and a `Rank`.
Out:  a `Trained`: measurements of every step, and the model and the optimizer at the end.
Next: `cli/matrix.py` compares two of them bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.launch import Rank
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.models.pipeline import ScheduleName, pipeline_stages
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.optim import AdamW
from flatfsdp.parallel import ParallelMesh, make_mesh
from flatfsdp.parity.trained import AfterBackward, OnStep, Step, Trained, ignore, now, require_positive
from flatfsdp.training.choices import Fusion, PrecisionName

STAGES_PER_RANK = 2
"""With the interleaved schedule."""


@dataclass(frozen=True)
class ParallelSettings:
    """Settings that determine a run's numbers.

    Attributes:
        schedule: schedule of the pipeline; no effect without one.
        fusion, optimize_backward_concat, in_place, batch, microbatches, steps, lr, clip, seed, data: as in
            `TrainSettings`; `batch` is for one data-parallel rank.
        reshard: free parameters after use (ZeRO-3), or keep them for a step (ZeRO-2).
    """

    model: LlamaConfig
    parallelism: Parallelism = field(default_factory=Parallelism)
    schedule: ScheduleName = "1f1b"
    precision: PrecisionName = PrecisionName.bf16
    reshard: bool = True
    fusion: Fusion = Fusion.fused
    optimize_backward_concat: bool = True
    in_place: bool = False
    batch: int = 2
    microbatches: int = 4
    steps: int = 10
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self)
        ranks = self.parallelism
        pipeline_stages(self.model, ranks.pp, self.schedule, STAGES_PER_RANK)
        shared = {"kv_heads": self.model.kv_heads}
        if ranks.sequence_parallel:
            shared["seq"] = self.model.seq
        for name, size in shared.items():
            if size % ranks.tp:
                raise ValueError(
                    f"{name} is {size}, which {ranks.tp} tensor-parallel ranks cannot share equally"
                )
        if ranks.pp > 1 and self.microbatches % ranks.pp:
            raise ValueError(
                f"microbatches is {self.microbatches}; pipelines of {ranks.pp} ranks need a multiple"
            )

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)


class Meshes:
    """Meshes, one for each parallelism: creating communicators is expensive."""

    def __init__(self) -> None:
        self._found: dict[Parallelism, ParallelMesh] = {}

    def of(self, parallelism: Parallelism) -> ParallelMesh:
        """Returns the mesh for a parallelism.  Collective the first time."""
        key = replace(parallelism, sequence_parallel=False)
        if key not in self._found:
            self._found[key] = make_mesh(
                pp=key.pp, dp_replicate=key.dp_replicate, dp_shard=key.dp_shard, tp=key.tp
            )
        return self._found[key]


def _pipeline(settings: ParallelSettings, mesh: ParallelMesh, device: torch.device) -> LlamaPipeline:
    return LlamaPipeline(
        settings.model,
        mesh,
        settings.schedule,
        microbatches=settings.microbatches,
        batch=settings.batch,
        device=device,
        stages_per_rank=STAGES_PER_RANK,
        precision=settings.precision.dtypes(),
        sequence_parallel=settings.parallelism.sequence_parallel,
        fuse_wgrad_accumulation=settings.fusion.option,
        recipe=settings.precision.recipe,
        seed=settings.seed,
        in_place=settings.in_place,
        reshard_after_forward=settings.reshard,
        optimize_backward_concat=settings.optimize_backward_concat,
    )


def train_parallel(
    settings: ParallelSettings,
    sampler: Sampler,
    rank: Rank,
    meshes: Meshes,
    on_step: OnStep = ignore,
    after_backward: AfterBackward = ignore,
) -> Trained:
    """Trains a fresh model; equal arguments give equal bits if the kernels are deterministic.

    Args:
        settings: settings of the run.
        sampler: source of the data.
        rank: this rank.
        meshes: meshes that earlier runs may have made.
        on_step: called after every step.
        after_backward: called with this rank's stages, a ModuleDict, when a step's gradients are reduced.
    """
    mesh = meshes.of(settings.parallelism)
    pipeline = _pipeline(settings, mesh, rank.device)
    named = zip(pipeline.numbers, pipeline.stages, strict=True)
    model = nn.ModuleDict({f"stage {number}": stage for number, stage in named})
    optimizer = AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=settings.clip,
        pp_group=mesh.pp_group,
    )
    steps: list[Step] = []
    local_losses = []
    tokens = settings.parallelism.dp * settings.microbatches * settings.batch * settings.model.seq
    for index in range(settings.steps):
        batches = [
            on(rank.device, sampler.sample(index, microbatch, mesh.dp_rank))
            for microbatch in range(settings.microbatches)
        ]
        for stage in pipeline.stages:
            stage.fsdp_state.shared.ledger.reset()
        start = now(rank.device)
        losses = pipeline.forward_backward(batches)
        losses_m = torch.stack(losses) if losses else torch.empty(0, device=rank.device)
        reduced = now(rank.device)
        after_backward(index, model)
        resumed = now(rank.device)
        optimizer.step()
        optimizer.zero_grad()
        ms = 1e3 * (now(rank.device) - resumed + reduced - start)
        local_losses.append(losses_m.cpu())
        loss = _mean_of_replicas(losses_m, settings, mesh, rank)
        assert optimizer.grad_norm is not None
        steps.append(Step(loss, float(optimizer.grad_norm), ms))
        on_step(loss, tokens / ms * 1e3)
    return Trained(steps, torch.stack(local_losses), _bytes_per_parameter(pipeline), model, optimizer)


def on(device: torch.device, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Moves a batch to the device."""
    tokens_bt, targets_bt = batch
    return tokens_bt.to(device), targets_bt.to(device)


def _mean_of_replicas(losses_m: Tensor, settings: ParallelSettings, mesh: ParallelMesh, rank: Rank) -> float:
    """Mean over microbatches and data-parallel ranks, added up in one fixed order on every rank."""
    has_losses = bool(losses_m.numel())
    sent = losses_m if has_losses else torch.zeros(settings.microbatches, device=rank.device)
    gathered = [torch.empty_like(sent) for _ in range(rank.world)]
    dist.all_gather(gathered, sent)
    # Ranks of the last stage have losses, equal on all tensor-parallel ranks.
    ranks = mesh.device_mesh.mesh[-1, ..., 0].flatten().tolist()
    return float(torch.stack([gathered[index] for index in ranks]).cpu().mean())


def _bytes_per_parameter(model: LlamaPipeline) -> dict[str, float]:
    """Sum of the ledgers of this rank's stages."""
    ledgers = [stage.fsdp_state.shared.ledger for stage in model.stages]
    kinds = dict.fromkeys(kind for ledger in ledgers for kind in ledger.bytes)
    parameters = sum(ledger.parameters for ledger in ledgers)
    return {kind: sum(ledger.bytes[kind] for ledger in ledgers) / parameters for kind in kinds}
