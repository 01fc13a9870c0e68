"""Hugging Face's Llama in the loop that trains the example GPT, for `convergence.py`.

In:   `HFTrainSettings`.
Out:  the same to `flatfsdp.training.gpt.train` as `TrainSettings`.
Next: `convergence.py` compares precisions.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.training.gpt import TrainSettings
from lib.hf_models import build, layer_class
from lib.llama import LlamaConfig


@dataclass(frozen=True)
class HFTrainSettings(TrainSettings):
    """A `LlamaForCausalLM` of the GPT's sizes, sharded in place.

    Its own layers compute it where the precision is bf16 or fp32; with all others it is fused.  Each FP8
    weight is cast in every microbatch.
    """

    in_place: bool = True
    caches_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.llama  # raises what is wrong with its sizes

    @property
    def unit(self) -> type[nn.Module]:
        return layer_class()

    @property
    def llama(self) -> LlamaConfig:
        """As wide as Llama's own, 8/3 of `hidden`, rounded up for FP8 products."""
        sizes = self.model
        ffn = -(-8 * sizes.hidden // (3 * ALIGNMENT)) * ALIGNMENT
        return LlamaConfig(
            sizes.layers, sizes.hidden, ffn, sizes.heads, sizes.heads, sizes.seq, vocab=sizes.vocab
        )

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = build(self.llama)
        if self.precision.has_own_layers:
            model = importlib.import_module("flatfsdp.compat.transformers").fuse(model)
        return model

    def loss(self, model: Any, tokens_bt: Tensor, targets_bt: Tensor, **position: bool) -> Tensor:
        """The model shifts the tokens itself: the last target of each sequence is left out."""
        return model(input_ids=tokens_bt, labels=tokens_bt).loss
