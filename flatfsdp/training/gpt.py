"""A GPT over data-parallel ranks, as a job for the training loop.

In:   `Settings`, a `Configuration` and a `Sampler`.
Out:  a `ModelJob`.
Next: `parity/loop.py` trains it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import by_class
from flatfsdp.comm.launch import Rank
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import TransformerLayer
from flatfsdp.models.fused_gpt import FusedGPT
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.training.choices import PrecisionName, Strategy
from flatfsdp.training.settings import Configuration, Settings


def check_sizes(settings: Settings[GPTConfig], precision: PrecisionName, *, interrupts: bool = False) -> None:
    """Checks that a GPT of these sizes can be computed.

    Raises:
        ValueError: if it cannot.
    """
    hidden, tokens = settings.model.hidden, settings.batch * settings.model.seq
    # Interruptions halve microbatches.
    least = (hidden, tokens // 2 if interrupts else tokens)
    if precision.recipe is not None and any(size % ALIGNMENT for size in least):
        raise ValueError(
            f"hidden is {hidden} and batch * seq {tokens}; FP8 GEMMs need multiples of {ALIGNMENT}"
            f"{', also of half of the tokens' if interrupts else ''}"
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
