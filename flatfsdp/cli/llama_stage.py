"""A Llama, or one pipeline stage of it, in FlatFSDP's own layers.

In:   tokens int64 [batch, seq] in the first stage, activations [seq, batch, hidden] in the others.
Out:  activations, or in the last stage logits [seq, batch, vocab].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatfsdp.fp8.linear import FuseWgrad
from flatfsdp.layers import Embedding, Linear, RMSNorm, RotaryPositionEmbedding, TransformerLayer


@dataclass(frozen=True)
class LlamaConfig:
    layers: int = 4
    hidden: int = 64
    ffn: int = 128
    heads: int = 4
    kv_heads: int = 2
    seq: int = 32
    vocab: int = 256


class LlamaStage(nn.Module):
    """Layers `index * n` to `(index + 1) * n` of all; each is seeded by itself."""

    def __init__(
        self, config: LlamaConfig, index: int, stages: int, seed: int, fuse_wgrad_accumulation: FuseWgrad
    ) -> None:
        super().__init__()
        self.config = config
        n = config.layers // stages
        fuses = bool(fuse_wgrad_accumulation)
        self.rotary = RotaryPositionEmbedding(config.hidden // config.heads)
        self.tokens: Embedding | None = None
        if index == 0:
            torch.manual_seed(seed)
            self.tokens = Embedding(config.vocab, config.hidden, fuse_wgrad_accumulation=fuses)
        self.layers = nn.ModuleList()
        for number in range(index * n, (index + 1) * n):
            torch.manual_seed(seed + 1 + number)
            self.layers.append(
                TransformerLayer(
                    config.hidden,
                    config.ffn,
                    config.heads,
                    config.kv_heads,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    bias=False,
                    activation="swiglu",
                    normalization="RMSNorm",
                    fuse_qkv_params=True,
                    fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                )
            )
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if index == stages - 1:
            torch.manual_seed(seed + 1 + config.layers)
            self.norm = RMSNorm(config.hidden)
            self.head = Linear(
                config.hidden,
                config.vocab,
                bias=False,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            )
            self.head.allows_fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x.t())
        rope = self.rotary(self.config.seq, x.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=rope)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
