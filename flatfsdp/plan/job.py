"""`Job`: a Llama, how ranks share it, and the shape of a step.

In:   the options of `LlamaPipeline` and `make_mesh`, as numbers; no process group, no parameters.
Out:  a consistent `Job`, or an error.
Next: `parts.py` derives each rank's parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.fp8 import BlockScaling, Recipe
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.models import LlamaConfig
from flatfsdp.models.pipeline import ScheduleName, pipeline_stages
from flatfsdp.options import Precision, Prefetch, require_flag


@dataclass(frozen=True)
class Job:
    """One training step of a Llama in FlatFSDP's own layers, with AdamW in FP32.

    Attributes:
        model: the model; `model.seq` is the length of all sequences.
        ranks: how ranks share it.
        batch: sequences in one microbatch of one data-parallel rank.
        microbatches: microbatches in one step.
        precision: dtypes of parameters and gradients; `precision.compute` is also that of activations.
        recipe: recipe of FP8 GEMMs; None: GEMMs are in `precision.compute`.
        fuse_wgrad_accumulation: whether GEMMs accumulate weight gradients, as in `Linear`.
        schedule: pipeline schedule, without effect if `ranks.pp` is 1.
        stages_per_rank: stages of each pipeline rank in an interleaved schedule.
        reshard_after_forward: True for ZeRO-3, False for ZeRO-2.
        prefetch: how many units are gathered ahead.

    Raises:
        ValueError: if there are fewer layers than stages; if the schedule cannot run this number of
            microbatches; if FP8 weights have no recipe.
    """

    model: LlamaConfig
    ranks: Parallelism
    batch: int = 1
    microbatches: int = 1
    precision: Precision = field(default_factory=lambda: Precision(compute=torch.bfloat16))
    recipe: Recipe | None = None
    fuse_wgrad_accumulation: FuseWgrad = True
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 2
    reshard_after_forward: bool = True
    prefetch: Prefetch = field(default_factory=Prefetch)

    def __post_init__(self) -> None:
        require_flag("reshard_after_forward", self.reshard_after_forward)
        for name in ("batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.stores_fp8 and self.recipe is None:
            raise ValueError(
                f"FP8 weights are for GEMMs in FP8, and precision is {self.precision.compute}; choose an "
                "FP8 precision, or leave FP8 weights out"
            )
        if self.stores_fp8 and isinstance(self.recipe, BlockScaling):
            raise ValueError(
                "FP8 weights have one scale each, and block scaling needs one a block; choose another "
                "recipe, or leave FP8 weights out"
            )
        stages, pp = len(self.stages), self.ranks.pp
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
    def stages(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return _stages(self.model, self.ranks.pp, self.schedule, self.stages_per_rank)

    @property
    def is_interleaved(self) -> bool:
        """Whether pipeline ranks have several stages."""
        return self.ranks.pp > 1 and self.schedule == "interleaved"

    @property
    def tokens(self) -> int:
        """Tokens in one microbatch of one data-parallel rank."""
        return self.batch * self.model.seq

    @property
    def step_tokens(self) -> int:
        """Tokens in one step of all ranks."""
        return self.ranks.dp * self.microbatches * self.tokens

    @property
    def is_fp8(self) -> bool:
        """Whether GEMMs of layers are in FP8."""
        return self.recipe is not None

    @property
    def stores_fp8(self) -> bool:
        """Whether the flat buffers hold weights of layers in FP8."""
        return self.packs_fp8 and self.precision.fp8_weights != "in_layers"

    @property
    def packs_fp8(self) -> bool:
        """Whether weights of layers have their own flat buffers, as those in FP8 do."""
        return self.precision.fp8_weights is not None


@cache
def _stages(model: LlamaConfig, pp: int, schedule: ScheduleName, stages_per_rank: int) -> tuple[range, ...]:
    return tuple(pipeline_stages(model, pp, schedule, stages_per_rank))
