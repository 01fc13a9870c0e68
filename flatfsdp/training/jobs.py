"""Trainings of the built-in models: settings, which determine all their numbers, and jobs made of them.

In:   words and numbers of a command line.
Out:  `Settings` and a `Configuration`; of these a `ModelJob`, or a `Trainee` with a Llama in parts.
Next: `parity/loop.py` trains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import by_class
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama, LlamaConfig, LlamaPipeline
from flatfsdp.models.gpt import GPT, Block, FusedGPT, GPTConfig
from flatfsdp.models.pipeline import ScheduleName, pipeline_stages
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.optim import AdamW
from flatfsdp.options import GradSync
from flatfsdp.parallel import ParallelMesh
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.loop import Trainee
from flatfsdp.parity.switches import Sharding
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy

Sizes = TypeVar("Sizes", GPTConfig, LlamaConfig)


@dataclass(frozen=True)
class Settings(Generic[Sizes]):
    """Sizes, length and data of a training.

    Attributes:
        batch: number of sequences in one microbatch of one data-parallel rank.
        microbatches: number of forwards and backwards before an optimizer step.
        data: file or folder with the text; None means the standard library.
    """

    model: Sizes
    batch: int = 4
    microbatches: int = 4
    steps: int = 20
    lr: float = 3e-3
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")

    def sampler(self) -> Sampler:
        """Reads the data; raises ValueError or OSError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)

    def batches(self, sampler: Sampler, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields tokens and targets of all microbatches of a data-parallel rank."""
        for step in count():
            for microbatch in range(self.microbatches):
                yield sampler.sample(step, microbatch, rank)


@dataclass(frozen=True)
class Configuration:
    """How a built-in model is computed, and shared over ranks.

    Attributes:
        parallelism: sizes of the mesh of a Llama; None: a GPT over data-parallel ranks.
        fusion: accumulation of weight gradients; only for FlatFSDP's own layers.
        schedule: schedule of the pipeline; no effect without one.
        sync: `grad_sync`.
        lanes: lanes of a step, for data-parallel ranks of a Llama.
    """

    parallelism: Parallelism | None
    precision: PrecisionName
    strategy: Strategy = Strategy.zero3
    fusion: Fusion = Fusion.fused
    schedule: ScheduleName = "1f1b"
    sync: GradSync = "last"
    lanes: Lanes | None = None

    @property
    def wgrad(self) -> str:
        """The fusion in words; empty for fused."""
        return "" if self.fusion is Fusion.fused else f"wgrad {self.fusion.value}"

    @property
    def name(self) -> str:
        """The configuration in words, such as "pp 2 x tp 2 + SP, 1f1b, bf16, zero3, wgrad two-pass"."""
        ranks = self.parallelism
        shared = () if ranks is None else (str(ranks), self.schedule if ranks.pp > 1 else "")
        sync = "grad_sync every" if self.sync == "every" else ""
        lanes = "" if self.lanes is None else f"lanes {self.lanes.number}"
        words = (*shared, self.precision.value, self.strategy.value, self.wgrad, sync, lanes)
        return ", ".join(filter(None, words))

    @property
    def sharding(self) -> Sharding:
        """The same for the training loop."""
        recipe = self.precision.recipe
        return Sharding(
            self.precision.dtypes(),
            recipe,
            reshard=self.strategy is Strategy.zero3,
            fusion=self.fusion.option,
            cache=recipe is not None and self.parallelism is None,
            sync=self.sync,
        )


def check_sizes(settings: Settings[GPTConfig], precision: PrecisionName, *, interrupts: bool = False) -> None:
    """Checks that a GPT of these sizes can be computed.

    Raises:
        ValueError: if it cannot.
    """
    # Interruptions halve microbatches.
    hidden, tokens = settings.model.hidden, settings.batch * settings.model.seq // (2 if interrupts else 1)
    if precision.recipe is not None and (hidden % ALIGNMENT or tokens % ALIGNMENT):
        raise ValueError(
            f"hidden is {hidden}, and GEMMs of {tokens} tokens; FP8 needs multiples of {ALIGNMENT} of both"
        )


def gpt_job(
    settings: Settings[GPTConfig],
    configuration: Configuration,
    sampler: Sampler,
    rank: Rank,
    *,
    interrupts: bool = False,
) -> ModelJob:
    """Makes the job of a GPT; collective with the strategy "dp".

    Args:
        settings: sizes, length and data.
        configuration: how it is computed and shared.
        sampler: source of the data.
        rank: this rank.
        interrupts: do other things between steps, see `Interruptions`.
    """
    model, unit = (FusedGPT, TransformerLayer) if configuration.precision.has_own_layers else (GPT, Block)
    replicates = configuration.strategy is Strategy.dp
    mesh = init_device_mesh(rank.device.type, (rank.world, 1)) if replicates else None
    return ModelJob(
        partial(model, settings.model, settings.seed),
        lambda index, world: settings.batches(sampler, index),
        by_class(unit),
        steps=settings.steps,
        microbatches=settings.microbatches,
        lr=settings.lr,
        # No weight decay: a flat shard holds matrices and norms alike, and norms should not decay.
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0),
        seed=settings.seed,
        options={"mesh": mesh},
        interrupts=interrupts,
    )


STAGES_PER_RANK = 2
"""With the interleaved schedule."""


def check_ranks(settings: Settings[LlamaConfig], configuration: Configuration) -> None:
    """Checks that the configuration's ranks can share the model.

    Raises:
        ValueError: if they cannot.
    """
    ranks, lanes = configuration.parallelism, configuration.lanes
    assert ranks is not None
    pipeline_stages(settings.model, ranks.pp, configuration.schedule, STAGES_PER_RANK)
    shared = {"kv_heads": settings.model.kv_heads}
    if ranks.sequence_parallel:
        shared["seq"] = settings.model.seq
    for name, size in shared.items():
        if size % ranks.tp:
            raise ValueError(f"{name} is {size}, which {ranks.tp} tensor-parallel ranks cannot share equally")
    if settings.microbatches % ranks.pp:
        raise ValueError(f"microbatches is {settings.microbatches}; {ranks.pp} stages need a multiple")
    if lanes is not None and settings.microbatches * ranks.dp % lanes.number:
        raise ValueError(
            f"microbatches is {settings.microbatches}; {lanes.number} lanes on {ranks.dp} ranks need a "
            f"multiple of {lanes.number // ranks.dp}"
        )


def llama_job(settings: Settings[LlamaConfig], configuration: Configuration, sampler: Sampler) -> ModelJob:
    """Makes the job of a Llama with lanes, for any number of data-parallel ranks.

    Args:
        settings: sizes, length and data.
        configuration: how it is computed and shared.
        sampler: source of the data.
    """
    assert configuration.parallelism is not None
    total = settings.microbatches * configuration.parallelism.dp
    of_step = replace(settings, microbatches=total)
    return ModelJob(
        partial(Llama, settings.model, seed=settings.seed),
        lambda index, _: of_step.batches(sampler, index),
        by_class(TransformerLayer),
        steps=settings.steps,
        microbatches=total,
        lr=settings.lr,
        optimizer=partial(AdamW, betas=(0.9, 0.95), weight_decay=0.0),
        seed=settings.seed,
    )


def llama(
    settings: Settings[LlamaConfig],
    parallelism: Parallelism,
    schedule: ScheduleName,
    sampler: Sampler,
    mesh: ParallelMesh,
    sharding: Sharding,
    rank: Rank,
) -> Trainee:
    """Builds and shards this rank's stages; without the first five arguments it is a `MakeTrainee`.

    Args:
        settings: sizes, length and data.
        parallelism: sizes of the mesh.
        schedule: schedule of the pipeline; no effect without one.
        sampler: source of the data.
        mesh: mesh of the parallelism.
        sharding: how stages are sharded and computed.
        rank: this rank.
    """
    pipeline = LlamaPipeline(
        settings.model,
        mesh,
        schedule,
        microbatches=settings.microbatches,
        batch=settings.batch,
        device=rank.device,
        stages_per_rank=STAGES_PER_RANK,
        sequence_parallel=parallelism.sequence_parallel,
        fuse_wgrad_accumulation=True if sharding.fusion is None else sharding.fusion,
        recipe=sharding.recipe,
        cache_fp8_weights=sharding.cache,
        seed=settings.seed,
        replay=sharding.replay,
        **sharding.options,
    )
    named = zip(pipeline.numbers, pipeline.stages, strict=True)
    model = nn.ModuleDict({f"stage {number}": stage for number, stage in named})
    optimizer = AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
        pp_group=mesh.pp_group,
    )

    def update() -> Tensor:
        optimizer.step()
        assert optimizer.grad_norm is not None
        return optimizer.grad_norm

    return Trainee(
        model,
        pipeline.stages,
        optimizer,
        settings.steps,
        settings.microbatches,
        settings.batches(sampler, mesh.dp_rank),
        pipeline.forward_backward,
        update,
        # Ranks of the last stage have losses, equal on all tensor-parallel ranks.
        with_losses=mesh.device_mesh.mesh[-1, ..., 0].flatten().tolist(),
    )
