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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.cli.data import Sampler, load_corpus
from flatfsdp.cli.llama_stage import LlamaConfig, LlamaStage
from flatfsdp.cli.ranks import Rank
from flatfsdp.cli.training import AfterBackward, Fusion, PrecisionName, Step, Trained, now
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import TransformerLayer
from flatfsdp.optim import AdamW
from flatfsdp.parallel import FlatStage


class Schedule(str, Enum):
    """In which order a pipeline's forwards and backwards run; `plain`: without a pipeline."""

    plain = "plain"
    gpipe = "GPipe"
    one_f_one_b = "1F1B"
    interleaved = "interleaved"

    @property
    def stages_a_rank(self) -> int:
        return 2 if self is Schedule.interleaved else 1


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
        return self.pp * self.schedule.stages_a_rank

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

    model: LlamaConfig = field(default_factory=LlamaConfig)
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
        for name in ("batch", "microbatches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.model.layers % self.layout.stages:
            raise ValueError(
                f"layers is {self.model.layers}, which {self.layout.stages} pipeline stages "
                f"({self.layout.name}) cannot share equally; choose a multiple"
            )
        if self.layout.pp > 1 and self.microbatches % self.layout.pp:
            raise ValueError(
                f"microbatches is {self.microbatches}; pipelines of {self.layout.pp} ranks need a multiple"
            )

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
        return Sampler(load_corpus(self.data), self.batch, self.model.seq, self.seed)


class Meshes:
    """A mesh for each shape, because communicators are dear; over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[int, ...], DeviceMesh] = {}

    def of(self, layout: Layout) -> DeviceMesh:
        """Dimensions pp, dp, tp; tensor-parallel ranks are neighbours."""
        shape = (layout.pp, layout.dp, layout.tp)
        if shape not in self._found:
            names = ("pp", "dp", "tp")
            self._found[shape] = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        return self._found[shape]


class Stages(nn.Module):
    """This rank's stages of the model, and the order in which they run.

    Without a pipeline there is one stage, which is the whole model.
    """

    def __init__(self, settings: ParallelSettings, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        self.pp = mesh.get_local_rank("pp")
        layout = settings.layout
        self.indices = range(self.pp, layout.stages, layout.pp)
        self.models = [_wrapped_stage(settings, index, mesh, device) for index in self.indices]
        for index, model in zip(self.indices, self.models, strict=True):
            self.add_module(f"stage {index}", model)
        self.has_first, self.has_last = 0 in self.indices, layout.stages - 1 in self.indices
        self.schedule: Any = None
        if layout.pp > 1:
            self.schedule = self._schedule(mesh, device)

    def _schedule(self, mesh: DeviceMesh, device: torch.device) -> Any:
        settings, layout = self.settings, self.settings.layout
        model = settings.model
        split = layout.tp if layout.sequence_parallel else 1
        compute = settings.precision.compute
        tokens = torch.empty(settings.batch, model.seq, dtype=torch.int64, device=device)
        between = torch.empty(model.seq // split, settings.batch, model.hidden, dtype=compute, device=device)
        logits = torch.empty(
            model.seq, settings.batch, model.vocab // layout.tp, dtype=compute, device=device
        )
        stages = [
            FlatStage(
                module,
                index,
                layout.stages,
                # Given, so that no forward of zeros moves FP8 scales.
                input_args=tokens if index == 0 else between,
                output_args=logits if index == layout.stages - 1 else between,
                group=mesh.get_group("pp"),
            )
            for index, module in zip(self.indices, self.models, strict=True)
        ]
        kinds = {
            Schedule.gpipe: ScheduleGPipe,
            Schedule.one_f_one_b: Schedule1F1B,
            Schedule.interleaved: ScheduleInterleaved1F1B,
        }
        some: Any = stages if layout.schedule is Schedule.interleaved else stages[0]
        return kinds[layout.schedule](some, settings.microbatches, loss_fn=mean_loss)

    def forward_backward(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """All microbatches of a step; returns their losses, FP32 [microbatches], where the last stage is, and
        nothing, FP32 [0], elsewhere."""
        losses: list[Tensor] = []
        if self.schedule is None:
            (model,) = self.models
            for tokens_bt, targets_bt in microbatches(model, batches):
                losses.append(mean_loss(model(tokens_bt), targets_bt))
                (losses[-1] / len(batches)).backward()
        else:
            tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            self.schedule.step(
                *([tokens] if self.has_first else []),
                target=targets if self.has_last else None,
                losses=losses,
                return_outputs=False,
            )
        if not self.has_last:
            return torch.empty(0, device=batches[0][0].device)
        return torch.stack([loss.detach() for loss in losses])


def mean_loss(logits_tbv: Tensor, targets_bt: Tensor) -> Tensor:
    """Cross-entropy in nats, FP32, 0-dim."""
    return F.cross_entropy(logits_tbv.float().flatten(0, 1), targets_bt.t().flatten())


def _wrapped_stage(
    settings: ParallelSettings, index: int, mesh: DeviceMesh, device: torch.device
) -> FlatFSDP:
    is_stored = settings.precision is PrecisionName.fp8_weights
    return auto_wrap(
        LlamaStage(settings.model, index, settings.layout.stages, settings.seed, settings.fusion.option),
        by_class(TransformerLayer),
        mesh=mesh["dp"],
        device=device,
        precision=Precision(
            compute=settings.precision.compute, fp8_weights=CurrentScaling() if is_stored else None
        ),
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
        after_backward: gets this rank's stages, a `Stages`.
    """
    mesh = meshes.of(settings.layout)
    dp = mesh.get_local_rank("dp")
    model = Stages(settings, mesh, rank.device)
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    recipe = settings.precision.recipe
    steps: list[Step] = []
    local_losses = []
    tokens = settings.layout.dp * settings.microbatches * settings.batch * settings.model.seq
    for index in range(settings.steps):
        batches = [
            on(rank.device, sampler.sample(index, microbatch, dp))
            for microbatch in range(settings.microbatches)
        ]
        for stage in model.models:
            stage.ledger.reset()
        start = now(rank.device)
        # Ranks of other stages have other layers, and run their backwards at other times.
        with autocast(recipe is not None, recipe=recipe, amax_reduction_group=mesh.get_group("dp")):
            losses_m = model.forward_backward(batches)
        reduced = now(rank.device)
        after_backward(index, model)
        resumed = now(rank.device)
        norm = max(stage.clip_grad_norm_(settings.clip) for stage in model.models)
        optimizer.step()
        optimizer.zero_grad()
        ms = 1e3 * (now(rank.device) - resumed + reduced - start)
        local_losses.append(losses_m.cpu())
        steps.append(Step(_mean_of_replicas(losses_m, settings, mesh, rank), float(norm), ms))
        on_step(steps[-1].loss, tokens / ms * 1e3)
    return Trained(steps, torch.stack(local_losses), _bytes_per_parameter(model), model, optimizer)


def on(device: torch.device, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens_bt, targets_bt = batch
    return tokens_bt.to(device), targets_bt.to(device)


def _mean_of_replicas(losses_m: Tensor, settings: ParallelSettings, mesh: DeviceMesh, rank: Rank) -> float:
    """The mean over microbatches and data-parallel ranks, added up in one fixed order on every rank."""
    has_losses = bool(losses_m.numel())
    sent = losses_m if has_losses else torch.zeros(settings.microbatches, device=rank.device)
    gathered = [torch.empty_like(sent) for _ in range(rank.world)]
    dist.all_gather(gathered, sent)
    # The last stage's ranks have losses, and all tensor-parallel ones the same.
    ranks = mesh.mesh[-1, :, 0].tolist()
    return float(torch.stack([gathered[index] for index in ranks]).cpu().mean())


def _bytes_per_parameter(model: Stages) -> dict[str, float]:
    """The ledger of all of this rank's stages."""
    ledgers = [stage.ledger for stage in model.models]
    kinds = dict.fromkeys(kind for ledger in ledgers for kind in ledger.bytes)
    parameters = sum(ledger.parameters for ledger in ledgers)
    return {kind: sum(ledger.bytes[kind] for ledger in ledgers) / parameters for kind in kinds}
