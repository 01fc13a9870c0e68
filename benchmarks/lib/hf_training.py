"""The training of the example GPT for `convergence.py`, and of Hugging Face's Llama in its place.

In:   the same as for `flatfsdp.training.jobs.gpt_job`.
Out:  a `ModelJob`, or an optimizer.
Next: `convergence.py` compares precisions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from flatfsdp import by_class
from flatfsdp.comm.launch import Rank
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.models.text import Sampler
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.training.jobs import Configuration, Settings, gpt_job
from lib.hf_models import build, layer_class
from lib.llama import LlamaConfig


def llama_of(sizes: GPTConfig) -> LlamaConfig:
    """Sizes with Llama's ratio of widths, 8/3 of `hidden`, rounded up for FP8 GEMMs."""
    ffn = -(-8 * sizes.hidden // (3 * ALIGNMENT)) * ALIGNMENT
    return LlamaConfig(
        sizes.layers, sizes.hidden, ffn, sizes.heads, sizes.heads, sizes.seq, vocab=sizes.vocab
    )


def hf_job(
    settings: Settings[GPTConfig], configuration: Configuration, sampler: Sampler, rank: Rank
) -> ModelJob:
    """Makes the job of a `LlamaForCausalLM` of the GPT's sizes.

    Its own layers compute it in bf16 and fp32; with all other precisions it is fused.
    """
    return replace(
        gpt_job(settings, configuration, sampler, rank),
        build_model=partial(_built, settings, is_fused=configuration.precision.has_own_layers),
        policy=by_class(layer_class()),
        loss=_loss,
    )


def _built(settings: Settings[GPTConfig], is_fused: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = build(llama_of(settings.model))
    return importlib.import_module("flatfsdp.compat.transformers").fuse(model) if is_fused else model


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss; the model itself shifts the tokens, so the last target of each sequence is unused."""
    tokens_bt, _ = batch
    return model(input_ids=tokens_bt, labels=tokens_bt).loss


def decaying(
    steps: int, warm_up: int, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """AdamW whose learning rate rises linearly in the first steps, and falls linearly to zero."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def factor(step: int) -> float:
        return (min(1.0, (step + 1) / warm_up) if warm_up else 1.0) * (1 - step / steps)

    schedule = LambdaLR(optimizer, factor)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer
