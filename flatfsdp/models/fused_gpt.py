"""The GPT of `gpt.py` in FlatFSDP's own layers: FP8 GEMMs, weight gradients straight into main_grad.

In:   tokens int64 [batch, seq], and optionally targets of the same shape.
Out:  the mean next-byte loss (FP32, 0-dim), or the logits [batch, seq, vocab].
Next: `training/jobs.py` wraps it, one unit for each `TransformerLayer` and one for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatfsdp.layers import Embedding, LayerNorm, Linear, TransformerLayer
from flatfsdp.layers.shared import InitMethod
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.models.gpt import GPTConfig, logits_or_loss


class FusedGPT(nn.Module):
    """The model of `GPT` in FlatFSDP's own layers, with the same initial distribution.

    The same `seed` gives the same parameters on every rank.  The head stays out of FP8, as is usual for the
    last layer; its weight gradient is fused like the others.
    """

    def __init__(self, config: GPTConfig, seed: int = 0, fuse_wgrad_accumulation: FuseWgrad = True) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def normal(std: float) -> InitMethod:
            return lambda weight: weight.normal_(0.0, std, generator=generator)

        hidden = config.hidden
        inner = 0.5 / hidden**0.5
        to_residual = inner / (2 * config.layers) ** 0.5
        embedding_fuses = bool(fuse_wgrad_accumulation)

        def table(rows: int) -> Embedding:
            return Embedding(rows, hidden, init_method=normal(0.5), fuse_wgrad_accumulation=embedding_fuses)

        self.tokens = table(config.vocab)
        self.positions = table(config.seq)
        self.blocks = nn.ModuleList(
            TransformerLayer(
                hidden,
                4 * hidden,
                config.heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=normal(inner),
                output_layer_init_method=normal(to_residual),
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                attn_input_format="bshd",
            )
            for _ in range(config.layers)
        )
        self.norm = LayerNorm(hidden)
        self.head = Linear(
            hidden,
            config.vocab,
            bias=False,
            init_method=normal(inner),
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )
        self.head.allows_fp8 = False

    def forward(
        self, tokens_bt: Tensor, targets_bt: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """The mean cross-entropy in nats (FP32) if there are targets, else the logits [b, t, v].

        Args:
            tokens_bt: int64 [batch, seq].
            targets_bt: like `tokens_bt`, or None.
            is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts
                every time.

        Raises:
            ValueError: if the sequence is longer than `config.seq`.
        """
        positions_bt = self.config.positions_of(tokens_bt).expand_as(tokens_bt)
        x_btc = self.tokens(tokens_bt) + self.positions(positions_bt)
        for block in self.blocks:
            x_btc = block(x_btc, is_first_microbatch=is_first_microbatch)
        return logits_or_loss(self.head(self.norm(x_btc)), targets_bt)
