"""Hugging Face's Llama from configurations: the sizes that `hf.py` measures; nothing is downloaded.

In:   a `LlamaConfig` with the sizes alone.
Out:  a `LlamaForCausalLM` in FP32, on torch's default device, from torch's default generator.
Next: `hf_engines.py` shards it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from lib.llama import LlamaConfig

SIZES: dict[str, LlamaConfig] = {
    "8b8": LlamaConfig(8, 4096, 14336, 32, 8, seq=4096, vocab=128_256),
    "1b": LlamaConfig(16, 2048, 8192, 32, 8, seq=2048, vocab=128_256),
    "long": LlamaConfig(8, 4096, 14336, 32, 8, seq=16384, vocab=128_256),
    "tiny": LlamaConfig(2, 64, 160, 4, 2, seq=32, vocab=96),
}
"""Eight layers of Llama-3-8B, also with long sequences, and a model of 1.5 billion parameters.

Head and embedding are two weights.  The tiny one is for tests on CPU.
"""

MODELING = "transformers.models.llama.modeling_llama"
"""The module of transformers that has the model's classes."""


def build(config: LlamaConfig) -> Any:
    """Builds the model without a key-value cache, which would make each layer compile separately."""
    modeling = importlib.import_module(MODELING)
    sizes = importlib.import_module("transformers").LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.seq,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.float32,
    )
    return modeling.LlamaForCausalLM(sizes).train()


def layer_class() -> type[nn.Module]:
    """The class of the model's layers, each of which becomes a unit."""
    return importlib.import_module(MODELING).LlamaDecoderLayer
