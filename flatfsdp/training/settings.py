"""Settings of the built-in models' trainings, which determine all their numbers.

In:   words and numbers of a command line.
Out:  `Settings` and a `Configuration`.
Next: `gpt.py` and `llama.py` make jobs of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.models import LlamaConfig
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.models.text import Sampler, load_corpus
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
        for name in ("batch", "microbatches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")

    def sampler(self) -> Sampler:
        """Reads the data; raises DataError if it cannot be used."""
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
    """

    parallelism: Parallelism | None
    precision: PrecisionName
    strategy: Strategy = Strategy.zero3
    fusion: Fusion = Fusion.fused
    schedule: ScheduleName = "1f1b"

    @property
    def wgrad(self) -> str:
        """The fusion in words; empty for fused."""
        return "" if self.fusion is Fusion.fused else f"wgrad {self.fusion.value}"

    @property
    def name(self) -> str:
        """The configuration in words, such as "pp 2 x tp 2 + SP, 1f1b, bf16, zero3, wgrad two-pass"."""
        ranks = self.parallelism
        shared = () if ranks is None else (str(ranks), self.schedule if ranks.pp > 1 else "")
        return ", ".join(filter(None, (*shared, self.precision.value, self.strategy.value, self.wgrad)))

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
        )
