"""A language model from a configuration alone, and random tokens for it: what a plan and a benchmark need.

In:   `config.json` of a Hugging Face model, or the configuration itself; nothing is downloaded.
Out:  a `FromConfig`, which builds the model and its batches.
Next: `flatfsdp.plan.Model`, or training on random tokens.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.comm.paths import local_path
from flatfsdp.compat.transformers.fused.fuse import fuse

TASKS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Endings of architectures that return a loss of `input_ids` and `labels` of one shape."""


@dataclass(frozen=True)
class FromConfig:
    """A Hugging Face language model with random parameters, and random batches.

    Attributes:
        config: a `PretrainedConfig` with `architectures`.
        fused: whether `flatfsdp.compat.transformers.fuse` prepares the model.
        fp8: whether fused layers compute in FP8 within `flatfsdp.fp8.autocast`.
        checkpointed: whether layers keep their inputs only, and run again in the backward.
    """

    config: Any
    fused: bool = False
    fp8: bool = False
    checkpointed: bool = False

    @staticmethod
    def load(path: Path | str, **options: bool) -> FromConfig:
        """Reads `config.json`, or the folder that holds it.

        Args:
            options: fused, fp8, checkpointed.

        Raises:
            ValueError: if the path is a URL; if there is no such file, or it is not the configuration of a
                language model.
        """
        path = local_path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"there is no file {file}; pass the config.json of a model, or its folder")
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(file)
        return FromConfig(config, **options)

    def __post_init__(self) -> None:
        architecture = self.architecture
        if not architecture.endswith(TASKS):
            name = architecture or "a configuration without architectures"
            raise ValueError(
                f"{name} is not known to learn from input_ids and labels alone, like *{', *'.join(TASKS)}; "
                "plan it with functions that build the model and its batches"
            )
        if not hasattr(importlib.import_module("transformers"), architecture):
            raise ValueError(f"this version of transformers has no {architecture}; install one that does")

    @property
    def architecture(self) -> str:
        """Name of the model's class; empty if the configuration does not say."""
        found = getattr(self.config, "architectures", None) or [""]
        return str(found[0])

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence; None if the configuration does not say."""
        found = getattr(self.config, "max_position_embeddings", None)
        return int(found) if found else None

    def build(self) -> nn.Module:
        """The model in training mode, FP32, on torch's default device, from torch's default generator."""
        config = copy.deepcopy(self.config)
        config.dtype = torch.float32
        if hasattr(config, "use_cache"):
            # Keys and values of earlier tokens: training has no use for them.
            config.use_cache = False
        model: nn.Module = getattr(importlib.import_module("transformers"), self.architecture)(config).train()
        if self.fused:
            fuse(model, fp8=self.fp8)
        if self.checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model

    def batches(
        self, microbatches: int, batch: int, seq: int, *, device: torch.device | str = "cpu"
    ) -> Iterator[dict[str, Tensor]]:
        """Random tokens as `input_ids` and `labels`, int64 [batch, seq] each, one dict a microbatch.

        Raises:
            ValueError: if sequences are longer than the model's positions.
        """
        if self.longest is not None and seq > self.longest:
            raise ValueError(
                f"{seq} tokens are longer than the {self.longest} positions of {self.architecture}"
            )
        for _ in range(microbatches):
            ids = torch.randint(0, self.config.vocab_size, (batch, seq), device=device)
            yield {"input_ids": ids, "labels": ids}
