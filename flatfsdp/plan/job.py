"""`Job`: a model, how ranks share it, and the shape of a step.

In:   a `LlamaConfig`, or any `Model`, and options of training; no process group, no parameters.
Out:  a consistent `Job`, or an error.
Next: `stages.py` traces its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.contract.any_model import Loss
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.fp8 import BlockScaling, Recipe
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.models import LlamaConfig
from flatfsdp.models.llama import Llama
from flatfsdp.models.pipeline import ScheduleName, pipeline_stages
from flatfsdp.options import GradSync, Precision, Prefetch, require_flag


@dataclass(frozen=True, eq=False)
class Model:
    """Any model, and how it is trained.

    Attributes:
        build: builds the model, which is not sharded.  It is called with the meta device as the default one,
            so that large models need no memory.
        batches: the microbatches of one step, of one rank: as for `flatfsdp.parity.verify`.  Their values are
            not read, so tensors of any device will do.
        policy: which modules are units; None takes the items of the outermost lists of modules.
        loss: of (model, batch); None takes what the model returns.
        build_optimizer: of an iterable of parameters; None takes `flatfsdp.optim.AdamW`.
        max_norm: to which gradients are clipped; None leaves it out.
        options: of `flatfsdp.shard`, besides those of the `Job`.

    Raises:
        ValueError: if there is no batch; for `device` and `cpu_offload`, which are not planned.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Any]
    policy: WrapPolicy | None = None
    loss: Loss | None = None
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    max_norm: float | None = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("there is no batch; a plan needs the microbatches of one step")
        for name in ("device", "cpu_offload"):
            if self.options.get(name):
                raise ValueError(f"a plan is of a step with everything on GPUs; leave {name} out")


class Part(NamedTuple):
    """One pipeline stage of a Llama, or all of a model.

    Attributes:
        layers: their numbers; those of a `Model` are not known.
    """

    layers: range = range(0)
    has_embedding: bool = True
    has_head: bool = True


@dataclass(frozen=True)
class Job:
    """One training step to plan.

    Attributes:
        model: a Llama in FlatFSDP's own layers, with AdamW in FP32, whose `seq` is the length of all
            sequences; or any model.
        ranks: how ranks share it.  Tensor and pipeline parallelism are for a Llama.
        batch: sequences in one microbatch of one data-parallel rank; of a Llama.
        microbatches: microbatches in one step; a `Model` has its own.
        precision: dtypes of parameters and gradients; `precision.compute` is also that of a Llama's
            activations.  None: bf16 for a Llama, and the default of `flatfsdp.shard` for a `Model`.
        recipe: recipe of FP8 GEMMs; None: GEMMs are in `precision.compute`.
        fuse_wgrad_accumulation: whether a Llama's GEMMs accumulate weight gradients, as in `Linear`.
        schedule: pipeline schedule, without effect if `ranks.pp` is 1.
        stages_per_rank: stages of each pipeline rank in an interleaved schedule.
        reshard_after_forward: True for ZeRO-3, False for ZeRO-2.
        prefetch: how many units are gathered ahead.
        grad_sync: whether gradients are reduced in the last microbatch, or in every one.
        checkpoint_layers: whether units keep their inputs only, and run again in the backward.

    Raises:
        ValueError: if there are fewer layers than stages; if the schedule cannot run this number of
            microbatches; if FP8 weights have no recipe; for ranks that a `Model` cannot have; for
            grad_sync="auto".
    """

    model: LlamaConfig | Model
    ranks: Parallelism
    batch: int = 1
    microbatches: int = 1
    precision: Precision | None = None
    recipe: Recipe | None = None
    fuse_wgrad_accumulation: FuseWgrad = True
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 2
    reshard_after_forward: bool = True
    prefetch: Prefetch = field(default_factory=Prefetch)
    grad_sync: GradSync = "last"
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        require_flag("reshard_after_forward", self.reshard_after_forward)
        if isinstance(self.model, Model):
            object.__setattr__(self, "microbatches", len(self.model.batches))
            if self.ranks.tp * self.ranks.pp > 1:
                raise ValueError(
                    f"{self.ranks} is for a LlamaConfig; a plan does not know how to split the layers of "
                    "another model: leave tp and pp out"
                )
        if self.grad_sync == "auto":
            raise ValueError(
                'grad_sync is "auto"; a plan tells what the choice means: take "last" or "every"'
            )
        for name in ("batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        # A model of one's own may have its recipe inside.
        if self.stores_fp8 and self.recipe is None and not isinstance(self.model, Model):
            raise ValueError(
                f"FP8 weights are for GEMMs in FP8, and precision is {self.dtypes.compute}; choose an "
                "FP8 precision, or leave FP8 weights out"
            )
        if self.stores_fp8 and isinstance(self.recipe, BlockScaling):
            raise ValueError(
                "FP8 weights have one scale each, and block scaling needs one a block; choose another "
                "recipe, or leave FP8 weights out"
            )
        if self.ranks.pp > 1:
            self._check_pipeline()

    def _check_pipeline(self) -> None:
        stages, pp = sum(map(len, self.parts)), self.ranks.pp
        if self.is_interleaved:
            rounds = max(1, self.microbatches // pp)
            if self.microbatches % rounds:
                raise ValueError(
                    f"microbatches is {self.microbatches}; an interleaved schedule runs {rounds} rounds over "
                    f"{pp} pipeline ranks: choose a multiple of {pp}"
                )
        elif self.microbatches < stages:
            raise ValueError(
                f"microbatches is {self.microbatches}; a pipeline of {stages} stages needs at least as many"
            )

    @property
    def parts(self) -> list[list[Part]]:
        """The stages of each pipeline rank."""
        if isinstance(self.model, Model):
            return [[Part()]]
        return _parts(self.model, self.ranks.pp, self.schedule, self.stages_per_rank)

    @property
    def is_interleaved(self) -> bool:
        """Whether pipeline ranks have several stages."""
        return self.ranks.pp > 1 and self.schedule == "interleaved"

    @property
    def tokens(self) -> int | None:
        """Tokens in one step of all ranks; None if the batches are a model's own."""
        if isinstance(self.model, Model):
            return None
        return self.ranks.dp * self.microbatches * self.batch * self.model.seq

    @property
    def between_stages(self) -> int:
        """Bytes that one pipeline stage sends the next in one microbatch."""
        if isinstance(self.model, Model) or self.ranks.pp == 1:
            return 0
        tokens = self.batch * self.model.seq // self.ranks.sequence_ranks
        return tokens * self.model.hidden * self.dtypes.compute.itemsize

    @property
    def dtypes(self) -> Precision:
        """The dtypes of a step."""
        compute = torch.float32 if isinstance(self.model, Model) else torch.bfloat16
        return self.precision or Precision(compute=compute)

    @property
    def stores_fp8(self) -> bool:
        """Whether the flat buffers hold weights of layers in FP8."""
        return self.dtypes.fp8_weights not in (None, "in_layers")

    def require_sizes(self) -> None:
        """Checks the sizes of a Llama, by one layer of it.

        Raises:
            ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8.
        """
        if isinstance(self.model, Model):
            return
        ranks = self.ranks
        model = Llama(
            replace(self.model, layers=1),
            tp_size=ranks.tp,
            sequence_parallel=ranks.sequence_parallel,
            device="meta",
        )
        if ranks.sequence_parallel:
            model.parallel.share("Llama", "the sequence length", self.model.seq)
        if self.recipe is not None:
            model.require_fp8_shapes(self.batch * self.model.seq)


@cache
def _parts(config: LlamaConfig, pp: int, schedule: ScheduleName, stages_per_rank: int) -> list[list[Part]]:
    stages = pipeline_stages(config, pp, schedule, stages_per_rank)
    parts = [Part(layers, number == 0, number == len(stages) - 1) for number, layers in enumerate(stages)]
    return [parts[rank::pp] for rank in range(pp)]
