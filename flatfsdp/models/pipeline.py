"""`LlamaPipeline`: this rank's stages of a Llama, sharded, and the schedule that runs them.

In:   the microbatches of a step.
Out:  their losses, and reduced gradients.
Next: any optimizer over `parameters()`; `flatfsdp.checkpoint` saves `stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.checking.identity import DEFAULT_TIMEOUT
from flatfsdp.comm.device import indexed
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import by_class
from flatfsdp.engine.replay.eager_or_replayed import replayed
from flatfsdp.engine.whole.units import root_of
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import TransformerLayer
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.microbatch import microbatches
from flatfsdp.models.config import LlamaConfig, stage_layers
from flatfsdp.models.llama import Llama
from flatfsdp.options import GradSync, Precision
from flatfsdp.parallel import FlatStage, ParallelMesh

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: dict[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def pipeline_stages(
    config: LlamaConfig, pp_size: int, schedule: ScheduleName, stages_per_rank: int
) -> list[range]:
    """The layers of all stages; pipeline rank r has stages r, r + pp_size, ...

    Args:
        config: sizes of the model.
        pp_size: number of pipeline ranks.
        schedule: name of the schedule.
        stages_per_rank: for the interleaved schedule; otherwise each rank has one stage.

    Raises:
        ValueError: if the schedule is unknown, or there are fewer layers than stages.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {get_args(ScheduleName)}")
    is_interleaved = pp_size > 1 and schedule == "interleaved"
    total = pp_size * (stages_per_rank if is_interleaved else 1)
    return stage_layers(config.layers, total, config.head_layers)


class LlamaPipeline:
    """A Llama over pipeline-, data- and tensor-parallel ranks; each transformer layer is a unit.

        model = LlamaPipeline(PRESETS["1b"], make_mesh(pp=2, tp=2), "1f1b", microbatches=8, batch=1)
        optimizer = AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0, pp_group=model.mesh.pp_group)
        losses = model.forward_backward(batches)
        optimizer.step()
        losses = model.evaluate(others)

    Collective over all ranks of `mesh`.  With one pipeline rank there is one stage, and microbatches run one
    after the other, without a schedule.

    Args:
        config: sizes of the model.
        mesh: the ranks and their dimensions.
        schedule: "gpipe", "1f1b", or "interleaved", which has several stages on each rank.
        microbatches: number of microbatches in one step of each data-parallel rank; with lanes, of all these
            ranks together.
        batch: sequences in one microbatch of one data-parallel rank, all of `config.seq` tokens.
        device: device of the model; default: the CPU.
        stages_per_rank: number of stages on each rank with the interleaved schedule.
        precision: dtypes of parameters, computation and gradients; default: `Precision()`.
        sequence_parallel: split activations between layers over the tensor-parallel ranks along the sequence.
        tp_overlap: overlap tensor-parallel communication with GEMMs, on GPUs.
        fuse_wgrad_accumulation: add weight gradients to FP32 `main_grad` buffers in the GEMM.
        recipe: recipe of the layers' FP8 GEMMs; None: no FP8.
        cache_fp8_weights: cast FP8 weights once a step, and keep them.
        seed: seed of the initial values.
        replay: run microbatches as CUDA graphs (`flatfsdp.replayed`); for one pipeline rank.
        grad_sync: option of `flatfsdp.shard`; with "every" each microbatch's backward reduces gradients, and
            no rank holds those of all its layers in between.
        lanes: option of `flatfsdp.shard`, with which any number of data-parallel ranks has the same bits; for
            one pipeline rank and one tensor-parallel rank.
        fsdp_options: further options of `flatfsdp.shard`.

    Attributes:
        stages: stages of this rank, in the order of the model.
        numbers: their numbers among all stages.
        has_first, has_last: whether this rank has the first, or the last, stage of the model.
        own_microbatches: numbers of the microbatches of a step that this rank runs, in its order; with lanes,
            among those of all ranks.
        replayed: the function that runs each microbatch, which counts its replays; None without `replay`.

    Raises:
        NotImplementedError: for lanes with pipeline or tensor-parallel ranks.
        ValueError: if the schedule is unknown or does not suit the number of microbatches; if `replay` is
            combined with a schedule or cached FP8 weights; if the number of microbatches or `batch` is not
            positive; if lanes do not suit that number or the ranks; if there are fewer layers than stages; if
            the sequence does not divide evenly over the tensor-parallel ranks; if the recipe does not suit
            the tokens of a microbatch, or FP8 weights; if `Llama` refuses the sizes.
        RuntimeError: on all ranks of `mesh`, before anything is built, if they were given different models or
            steps. `device` and `fsdp_options` may differ between stages.
    """

    def __init__(
        self,
        config: LlamaConfig,
        mesh: ParallelMesh,
        schedule: ScheduleName = "1f1b",
        *,
        microbatches: int,
        batch: int,
        device: torch.device | str = "cpu",
        stages_per_rank: int = 2,
        precision: Precision | None = None,
        sequence_parallel: bool = False,
        tp_overlap: bool = False,
        fuse_wgrad_accumulation: FuseWgrad = True,
        recipe: Recipe | None = None,
        cache_fp8_weights: bool = False,
        seed: int = 0,
        replay: bool = False,
        grad_sync: GradSync = "last",
        lanes: int | Lanes | None = None,
        **fsdp_options: Any,
    ) -> None:
        precision = Precision() if precision is None else precision
        # All arguments but those in which stages may differ, so that none is forgotten.
        arguments = {
            name: value
            for name, value in {**locals()}.items()
            if name not in ("self", "config", "mesh", "device", "fsdp_options")
        }
        _check_same(config, mesh, **arguments, timeout=fsdp_options.get("timeout", DEFAULT_TIMEOUT))
        _check_tokens(config, mesh.tp_size if sequence_parallel else 1, microbatches, batch, recipe)
        has_one_scale = isinstance(recipe, (CurrentScaling, DelayedScaling))
        if isinstance(precision.fp8_weights, CurrentScaling) and not has_one_scale:
            raise ValueError(
                f"recipe is {recipe}; Precision(fp8_weights=...) needs a CurrentScaling or DelayedScaling"
            )
        if replay:
            _check_replay(mesh, cache_fp8_weights)
        lanes = Lanes.of(lanes)
        if lanes is None:
            self.own_microbatches = list(range(microbatches))
        else:
            self.own_microbatches = _microbatches_of_lanes(lanes, mesh, microbatches)
        self.config = config
        self.mesh = mesh
        self._divisor = microbatches
        self.batch = batch
        self._cache_fp8_weights = cache_fp8_weights
        layers = pipeline_stages(config, mesh.pp_size, schedule, stages_per_rank)
        numbers = self.numbers = range(mesh.pp_rank, len(layers), mesh.pp_size)
        fsdp_options |= {"device": device, "precision": precision, "grad_sync": grad_sync, "lanes": lanes}
        self.stages: list[Any] = []
        for number in numbers:
            part = Llama(
                config,
                layers[number],
                tp_group=mesh.tp_group,
                sequence_parallel=sequence_parallel,
                tp_overlap=tp_overlap,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                recipe=recipe,
                amax_group=mesh.stage_group,
                seed=seed,
                device="meta",
            )
            # On the meta device up to here, so no device ever has more than one whole unit.
            how = {**fsdp_options, "param_init_fn": part.initialize}
            self.stages.append(
                shard(part, by_class(TransformerLayer), mesh=mesh.dp, tp_group=mesh.tp_group, **how)
            )
        self.has_first, self.has_last = 0 in numbers, len(layers) - 1 in numbers
        self.replayed = replayed(self.stages[0], self._forward_backward) if replay else None
        self._schedule: Any = None
        if mesh.pp_size > 1:
            length = config.seq // mesh.tp_size if sequence_parallel else config.seq
            stages = self._flat_stages(len(layers), length, precision.compute)
            self._first = stages[0]
            some: Any = stages if schedule == "interleaved" else stages[0]
            self._schedule = SCHEDULES[schedule](some, microbatches, loss_fn=self.stages[-1].loss)

    def _flat_stages(self, total: int, length: int, dtype: torch.dtype) -> list[FlatStage]:
        """This rank's stages in the form that a schedule runs.

        Args:
            total: number of stages of all ranks.
            length: tokens of a sequence between layers, on each tensor-parallel rank.
            dtype: dtype of the tensors that stages send each other.
        """
        config, mesh = self.config, self.mesh
        tokens = torch.empty(self.batch, config.seq, dtype=torch.int64, device="meta")
        hidden = torch.empty(length, self.batch, config.hidden, dtype=dtype, device="meta")
        vocab = config.vocab // mesh.tp_size
        logits = torch.empty(config.seq, self.batch, vocab, dtype=dtype, device="meta")
        return [
            FlatStage(
                stage,
                number,
                total,
                # Given, so that no forward of zeros has to find them out, which would update FP8 scales.
                input_args=tokens if number == 0 else hidden,
                output_args=logits if number == total - 1 else hidden,
                group=mesh.pp_group,
                cache_fp8_weights=self._cache_fp8_weights,
            )
            for number, stage in zip(self.numbers, self.stages, strict=True)
        ]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The flat shards of all of this rank's stages."""
        return (parameter for stage in self.stages for parameter in stage.parameters())

    def grad_sync_of_stages(self) -> list[GradSync]:
        """When each stage of the model reduces gradients: what `grad_sync` says, or "auto" has chosen.

        Where parameters are not sharded it is "last", as "every" makes no difference there.  Collective over
        all ranks.
        """
        reduces = [root_of(stage).shared.reduces_every for stage in self.stages]
        own = [*zip(self.numbers, reduces, strict=True)]
        device = self.stages[0].fsdp_state.shared.device
        of_ranks = all_gather_object(own, Ranks.of(default_group()), device)
        found = dict(stage for of_rank in of_ranks for stage in of_rank)
        return ["every" if found[number] else "last" for number in sorted(found)]

    def forward_backward(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Runs the microbatches of a step, and reduces gradients.

        Gradients are divided by the number of microbatches, and reduced in the last backward of each stage
        (or in every one, with `grad_sync="every"`).

        Args:
            batches: tokens and targets, int64 [batch, seq] each, of `own_microbatches`.

        Returns:
            The loss of each microbatch, FP32, 0-dim, on ranks with the last stage; an empty list elsewhere.

        Raises:
            ValueError: if there is not one batch for each of `own_microbatches`, or one has another shape.
        """
        self._check(batches)
        losses: list[Tensor] = []
        if self._schedule is None:
            run = self.replayed or self._forward_backward
            losses += [run(*batch) for batch in microbatches(self.stages[0], batches)]
        else:
            self._run(self._schedule.step, batches, losses)
        return [loss.detach() for loss in losses]

    def _forward_backward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """Runs one microbatch through the only stage; returns its loss."""
        (model,) = self.stages
        is_first = model.fsdp_state.shared.microbatch.is_first if self._cache_fp8_weights else None
        loss: Tensor = model(tokens_bs, targets_bs, is_first)
        (loss / self._divisor).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Losses of as many microbatches as a step has, without gradients.

        It may run between steps and does not affect them.  Arguments, result and errors are those of
        `forward_backward`.
        """
        self._check(batches)
        if self._schedule is None:
            (model,) = self.stages
            return [model(tokens_bs, targets_bs) for tokens_bs, targets_bs in batches]
        losses: list[Tensor] = []
        self._run(self._schedule.eval, batches, losses)
        return losses

    def _check(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Checks the batches before any rank sends anything."""
        count = len(self.own_microbatches)
        if len(batches) != count:
            raise ValueError(f"there are {len(batches)} batches, and {count} microbatches; pass one for each")
        shape = (self.batch, self.config.seq)
        for tensor in (tensor for batch in batches for tensor in batch):
            if tensor.shape != shape:
                raise ValueError(f"a batch is {tuple(tensor.shape)}; the pipeline was made for {shape}")

    def _run(
        self, run: Callable[..., Any], batches: Sequence[tuple[Tensor, Tensor]], losses: list[Tensor]
    ) -> None:
        """Runs all microbatches through the schedule; the last stage's losses are appended to `losses`."""
        tokens_bs, targets_bs = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with self._first.explained_step():
            run(
                *([tokens_bs] if self.has_first else []),
                target=targets_bs if self.has_last else None,
                losses=losses,
                return_outputs=False,
            )


def _check_same(config: LlamaConfig, mesh: ParallelMesh, **arguments: Any) -> None:
    """Compares the arguments of all ranks, as stages of different models would not fit together.

    Raises:
        RuntimeError: if they differ; on all ranks.
    """
    sizes = {f"config.{name}": value for name, value in asdict(config).items()}
    lines = [f"{name}={value!r} of LlamaPipeline" for name, value in {**sizes, **arguments}.items()]
    device = indexed(torch.device(mesh.device_mesh.device_type))
    check_same_on_all_ranks(lines, mesh.dimensions, device, arguments["timeout"])


def _check_tokens(
    config: LlamaConfig, sequence_ranks: int, microbatches: int, batch: int, recipe: Recipe | None
) -> None:
    """Checks the sizes of a step.

    Raises:
        ValueError: if a size is not positive, does not divide evenly, or does not suit FP8.
    """
    for name, count in (("microbatches", microbatches), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be positive")
    if config.seq % sequence_ranks:
        raise ValueError(
            f"seq is {config.seq}; choose a multiple of the {sequence_ranks} tensor-parallel ranks"
        )
    if recipe is not None and batch * config.seq % ALIGNMENT:
        raise ValueError(f"{batch} x {config.seq} tokens in a microbatch: FP8 needs multiples of {ALIGNMENT}")


def _check_replay(mesh: ParallelMesh, cache_fp8_weights: bool) -> None:
    """Checks that microbatches can be replayed.

    Raises:
        ValueError: if there are pipeline or tensor-parallel ranks, or cached FP8 weights.
    """
    if mesh.pp_size > 1:
        raise ValueError(
            f"replay with {mesh.pp_size} pipeline ranks, whose schedule runs on the host: leave one out"
        )
    if mesh.tp_size > 1:
        raise ValueError(
            f"replay with {mesh.tp_size} tensor-parallel ranks, which cannot be recorded yet: leave one out"
        )
    if cache_fp8_weights:
        raise ValueError(
            "replay and cache_fp8_weights exclude each other; store weights by Precision(fp8_weights=...)"
        )


def _microbatches_of_lanes(lanes: Lanes, mesh: ParallelMesh, total: int) -> list[int]:
    """Numbers of the microbatches that this rank runs in a step of `total`.

    Raises:
        NotImplementedError: if there are pipeline or tensor-parallel ranks.
        ValueError: if the lanes do not suit the data-parallel ranks, or the number of microbatches.
    """
    if mesh.pp_size > 1:
        raise NotImplementedError(
            f"lanes with {mesh.pp_size} pipeline ranks, whose schedule does not say where a lane ends: leave "
            "one out"
        )
    grid = Grid.of(mesh.dp, mesh.tp_group)
    lanes.require_fit(grid)
    return lanes.microbatches(grid, total)
