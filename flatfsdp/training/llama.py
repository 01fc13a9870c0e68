"""A Llama over tensor, pipeline and data parallel ranks, for the training loop.

In:   `Settings`, a `Parallelism`, a `Sampler` and a mesh.
Out:  a `Trainee`.
Next: `parity/loop.py` trains it.
"""

from __future__ import annotations

from torch import Tensor, nn

from flatfsdp.comm.launch import Rank
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.models.pipeline import ScheduleName, pipeline_stages
from flatfsdp.models.text import Sampler
from flatfsdp.optim import AdamW
from flatfsdp.parallel import ParallelMesh
from flatfsdp.parity.loop import Trainee
from flatfsdp.parity.switches import Sharding
from flatfsdp.training.settings import Settings

STAGES_PER_RANK = 2
"""With the interleaved schedule."""


def check_ranks(settings: Settings[LlamaConfig], ranks: Parallelism, schedule: ScheduleName) -> None:
    """Checks that these ranks can share the model.

    Raises:
        ValueError: if they cannot.
    """
    pipeline_stages(settings.model, ranks.pp, schedule, STAGES_PER_RANK)
    shared = {"kv_heads": settings.model.kv_heads}
    if ranks.sequence_parallel:
        shared["seq"] = settings.model.seq
    for name, size in shared.items():
        if size % ranks.tp:
            raise ValueError(f"{name} is {size}, which {ranks.tp} tensor-parallel ranks cannot share equally")
    if settings.microbatches % ranks.pp:
        raise ValueError(f"microbatches is {settings.microbatches}; {ranks.pp} stages need a multiple")


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
