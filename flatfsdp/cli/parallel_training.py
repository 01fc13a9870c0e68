"""Trains one configuration of the matrix: a Llama over tensor, pipeline and data parallel ranks.

In:   `ParallelSettings`, a `Sampler` and a `Rank`.
Out:  a `Trained`, as `training.py` returns.
Next: `matrix.py` compares two of them bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import Precision
from flatfsdp.cli.training import AfterBackward, Fusion, PrecisionName, Step, Trained, now, require_positive
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.launch import Rank
from flatfsdp.models import LlamaConfig, LlamaPipeline, stage_layers
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.optim import AdamW
from flatfsdp.parallel import ParallelMesh, make_mesh


class Schedule(str, Enum):
    """In which order a pipeline's forwards and backwards run; `plain`: without a pipeline."""

    plain = "plain"
    gpipe = "GPipe"
    one_f_one_b = "1F1B"
    interleaved = "interleaved"

    @property
    def stages_per_rank(self) -> int:
        return 2 if self is Schedule.interleaved else 1

    @property
    def option(self) -> ScheduleName:
        """Of `LlamaPipeline`; without a pipeline it does not matter."""
        if self is Schedule.gpipe:
            return "gpipe"
        return "interleaved" if self is Schedule.interleaved else "1f1b"


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, of which there are tp * pp * dp.

    Attributes:
        tp: ranks that share each layer.
        pp: ranks that have different layers.
        dp: ranks that have different data, and shards of the same parameters.
        schedule: of the pipeline; plain without one.
        sequence_parallel: activations between layers are split over the tp ranks, too.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: Schedule = Schedule.plain
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1:
            raise ValueError(f"a layout has {self.tp} x {self.pp} x {self.dp} ranks; each must be at least 1")
        if (self.pp > 1) is (self.schedule is Schedule.plain):
            raise ValueError(f"{self.pp} pipeline ranks do not go with the schedule {self.schedule.value}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def stages(self) -> int:
        return self.pp * self.schedule.stages_per_rank

    @property
    def sizes(self) -> str:
        """Such as "TP 2+SP x PP 2 x DP 2"."""
        split = "+SP" if self.sequence_parallel else ""
        named = ((f"TP {self.tp}{split}", self.tp), (f"PP {self.pp}", self.pp), (f"DP {self.dp}", self.dp))
        return " x ".join(name for name, size in named if size > 1) or "one rank"

    @property
    def name(self) -> str:
        """Such as "TP 2+SP x PP 2 x DP 2, 1F1B"."""
        return self.sizes + ("" if self.schedule is Schedule.plain else f", {self.schedule.value}")


@dataclass(frozen=True)
class ParallelSettings:
    """Everything that decides a run's numbers.

    Attributes:
        precision: of the compute, all in FlatFSDP's own layers.
        fusion, optimize_backward_concat, batch, microbatches, steps, lr, clip, seed, data: as in
            `TrainSettings`; `batch` is of one data-parallel rank.
        reshard: ZeRO-3, else ZeRO-2.
    """

    model: LlamaConfig
    layout: Layout = field(default_factory=Layout)
    precision: PrecisionName = PrecisionName.bf16
    reshard: bool = True
    fusion: Fusion = Fusion.fused
    optimize_backward_concat: bool = True
    batch: int = 2
    microbatches: int = 4
    steps: int = 10
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self)
        stage_layers(self.model.layers, self.layout.stages)
        shared = {"kv_heads": self.model.kv_heads}
        if self.layout.sequence_parallel:
            shared["seq"] = self.model.seq
        for name, size in shared.items():
            if size % self.layout.tp:
                raise ValueError(
                    f"{name} is {size}, which {self.layout.tp} tensor-parallel ranks cannot share equally"
                )
        if self.layout.pp > 1 and self.microbatches % self.layout.pp:
            raise ValueError(
                f"microbatches is {self.microbatches}; pipelines of {self.layout.pp} ranks need a multiple"
            )

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)


class Meshes:
    """A mesh for each layout's sizes, because communicators are dear."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], ParallelMesh] = {}

    def of(self, layout: Layout) -> ParallelMesh:
        """Collective, the first time."""
        sizes = (layout.pp, layout.dp, layout.tp)
        if sizes not in self._found:
            self._found[sizes] = make_mesh(pp=layout.pp, dp_shard=layout.dp, tp=layout.tp)
        return self._found[sizes]


def _pipeline(settings: ParallelSettings, mesh: ParallelMesh, device: torch.device) -> LlamaPipeline:
    stored = CurrentScaling() if settings.precision is PrecisionName.fp8_weights else None
    return LlamaPipeline(
        settings.model,
        mesh,
        settings.layout.schedule.option,
        microbatches=settings.microbatches,
        batch=settings.batch,
        device=device,
        precision=Precision(compute=settings.precision.compute, fp8_weights=stored),
        sequence_parallel=settings.layout.sequence_parallel,
        fuse_wgrad_accumulation=settings.fusion.option,
        recipe=settings.precision.recipe,
        seed=settings.seed,
        reshard_after_forward=settings.reshard,
        optimize_backward_concat=settings.optimize_backward_concat,
    )


def train_parallel(
    settings: ParallelSettings,
    sampler: Sampler,
    rank: Rank,
    meshes: Meshes,
    on_step: Callable[[float, float], None],
    after_backward: AfterBackward,
) -> Trained:
    """Trains a fresh model; the same arguments give the same bits wherever the kernels are deterministic.

    Args:
        on_step: called with the loss and with tokens per second of all ranks.
        after_backward: gets this rank's stages, a ModuleDict.
    """
    mesh = meshes.of(settings.layout)
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
    tokens = settings.layout.dp * settings.microbatches * settings.batch * settings.model.seq
    for index in range(settings.steps):
        batches = [
            on(rank.device, sampler.sample(index, microbatch, mesh.dp_rank))
            for microbatch in range(settings.microbatches)
        ]
        for stage in pipeline.stages:
            stage.ledger.reset()
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
    tokens_bt, targets_bt = batch
    return tokens_bt.to(device), targets_bt.to(device)


def _mean_of_replicas(losses_m: Tensor, settings: ParallelSettings, mesh: ParallelMesh, rank: Rank) -> float:
    """The mean over microbatches and data-parallel ranks, added up in one fixed order on every rank."""
    has_losses = bool(losses_m.numel())
    sent = losses_m if has_losses else torch.zeros(settings.microbatches, device=rank.device)
    gathered = [torch.empty_like(sent) for _ in range(rank.world)]
    dist.all_gather(gathered, sent)
    # The last stage's ranks have losses, and all tensor-parallel ones the same.
    ranks = mesh.device_mesh.mesh[-1, ..., 0].flatten().tolist()
    return float(torch.stack([gathered[index] for index in ranks]).cpu().mean())


def _bytes_per_parameter(model: LlamaPipeline) -> dict[str, float]:
    """The ledger of all of this rank's stages."""
    ledgers = [stage.ledger for stage in model.stages]
    kinds = dict.fromkeys(kind for ledger in ledgers for kind in ledger.bytes)
    parameters = sum(ledger.parameters for ledger in ledgers)
    return {kind: sum(ledger.bytes[kind] for ledger in ledgers) / parameters for kind in kinds}
