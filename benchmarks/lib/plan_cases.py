"""Models as people bring them, for `plan_models.py`: what is trained, measured, and planned.

In:   configurations of Hugging Face, built here; nothing is downloaded.
Out:  `CASES` by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp import Precision
from flatfsdp.compat.transformers.from_config import FromConfig
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe
from flatfsdp.optim import SGD, AdamW
from flatfsdp.plan import Job, Model, Parallelism, Plan, plan

BF16 = Precision(compute=torch.bfloat16)
FP8_WEIGHTS = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
DELAYED = DelayedScaling(amax_history_len=16)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-4, nonfinite="skip"),
    "sgd": partial(SGD, lr=1e-3, nonfinite="skip"),
}


@dataclass(frozen=True)
class Case:
    """One model and how it is trained.

    Attributes:
        family: of the configuration's and the model's class: "GPT2" of GPT2Config.
        head: the end of the model's class: "LMHeadModel" of GPT2LMHeadModel.
        sizes: of the configuration.
        options: of `FromConfig`.
        optimizer: one of `OPTIMIZERS`.
    """

    name: str
    family: str
    head: str
    batch: int
    seq: int
    microbatches: int = 4
    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, bool] = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def recipe(self) -> Recipe | None:
        return DELAYED if self.options.get("fp8") else None

    @property
    def precision(self) -> Precision:
        return FP8_WEIGHTS if self.options.get("fp8") else BF16

    def source(self) -> FromConfig:
        """The model's configuration."""
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{self.family}Config")(**self.sizes)
        config.architectures = [f"{self.family}{self.head}"]
        return FromConfig(config, **self.options)

    def build(self) -> nn.Module:
        """The model on torch's default device."""
        return self.source().build()

    def batches(self, device: torch.device | str = "cpu") -> list[dict[str, Tensor]]:
        """The microbatches of one step."""
        return list(self.source().batches(self.microbatches, self.batch, self.seq, device=device))

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer."""
        return OPTIMIZERS[self.optimizer](parameters)

    def plan(self, gpus: int) -> Plan:
        """What `flatfsdp.plan` says of it."""
        model = Model(self.build, self.batches(), build_optimizer=self.optimizer_of, max_norm=None)
        ranks = Parallelism(dp_shard=gpus)
        return plan(Job(model, ranks, precision=self.precision, recipe=self.recipe))


def _llama(layers: int, hidden: int, ffn: int, seq: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": seq,
        "vocab_size": vocab,
    }


_8B = partial(_llama, hidden=4096, ffn=14336, seq=4096, vocab=128256)
_1B = _llama(8, 2048, 8192, 2048, 32000)
_MIXTRAL = {
    **_llama(4, 1024, 2816, 2048, 32000),
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
}
_FUSED, _FUSED_FP8 = {"fused": True}, {"fused": True, "fp8": True}

CASES = {
    case.name: case
    for case in (
        Case("gpt2", "GPT2", "LMHeadModel", 4, 1024),
        Case("bert", "Bert", "ForMaskedLM", 8, 512),
        Case("mixtral-4-layers", "Mixtral", "ForCausalLM", 2, 1024, sizes=_MIXTRAL),
        Case(
            "llama-checkpointed", "Llama", "ForCausalLM", 2, 2048, sizes=_1B, options={"checkpointed": True}
        ),
        Case("llama-fused-fp8", "Llama", "ForCausalLM", 2, 2048, sizes=_1B, options=_FUSED_FP8),
        # What one H200 holds of it with AdamW, and the whole model with plain SGD.
        Case("llama-8b-12-layers", "Llama", "ForCausalLM", 1, 4096, sizes=_8B(12), options=_FUSED_FP8),
        Case("llama-8b-fp8", "Llama", "ForCausalLM", 1, 4096, 4, _8B(32), _FUSED_FP8, "sgd"),
        Case("llama-8b-bf16", "Llama", "ForCausalLM", 1, 4096, 4, _8B(32), _FUSED, "sgd"),
        Case("gpt2-tiny", "GPT2", "LMHeadModel", 2, 32, 2, {"n_layer": 2, "n_embd": 64, "n_head": 2}),
    )
}
"""The last one is for tests on CPU."""
TINY = "gpt2-tiny"
