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
    """Settings of a `LlamaForCausalLM` of the GPT's sizes, sharded in place.

    Its own layers compute it in bf16 and fp32; with all other precisions it is fused.  Each FP8 weight is
    cast in every microbatch.
    """

    in_place: bool = True
    caches_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.llama  # raises what is wrong with its sizes

    @property
    def unit(self) -> type[nn.Module]:
        """The class of the layers that become units."""
        return layer_class()

    @property
    def llama(self) -> LlamaConfig:
        """Sizes with Llama's ratio of widths, 8/3 of `hidden`, rounded up for FP8 GEMMs."""
        sizes = self.model
        ffn = -(-8 * sizes.hidden // (3 * ALIGNMENT)) * ALIGNMENT
        return LlamaConfig(
            sizes.layers, sizes.hidden, ffn, sizes.heads, sizes.heads, sizes.seq, vocab=sizes.vocab
        )

    def build(self) -> nn.Module:
        """Builds the model from the seed, fused if the precision needs it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = build(self.llama)
        if self.precision.has_own_layers:
            model = importlib.import_module("flatfsdp.compat.transformers").fuse(model)
        return model

    def loss(self, model: Any, tokens_bt: Tensor, targets_bt: Tensor, **position: bool) -> Tensor:
        """The loss; the model itself shifts the tokens, so the last target of each sequence is unused."""
        return model(input_ids=tokens_bt, labels=tokens_bt).loss
