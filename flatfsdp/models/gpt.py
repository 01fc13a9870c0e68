"""A small GPT over bytes without any parallelism, which the examples and `verify` train, in two forms.

In:   tokens int64 [batch, seq], and optionally targets of the same shape.
Out:  the mean next-byte loss (FP32, 0-dim), or the logits [batch, seq, vocab].
Next: `training/jobs.py` wraps it, one unit for each layer and one for the rest.

Shapes in names: b = batch, t = sequence, c = hidden, h = heads, d = hidden / heads, v = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.layers import Embedding, LayerNorm, Linear, TransformerLayer
from flatfsdp.layers.shared import InitMethod
from flatfsdp.matmul.linear_map import FuseWgrad


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `seq` is the longest sequence, which is also the number of learned positions."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 128
    vocab: int = 256

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{field} is {value}; it must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of heads, {self.heads}")

    def positions_of(self, tokens_bt: Tensor) -> Tensor:
        """The positions 0, 1, 2, ..., int64 [t].

        Raises:
            ValueError: if the sequence is longer than `seq`.
        """
        seq = tokens_bt.shape[1]
        if seq > self.seq:
            raise ValueError(f"a sequence of {seq} tokens does not fit the model's {self.seq} positions")
        return torch.arange(seq, device=tokens_bt.device)


class Attention(nn.Module):
    """Causal self-attention, [b, t, c] -> [b, t, c]; one matrix for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Causal self-attention, [b, t, c] -> [b, t, c]."""
        q_bhtd, k_bhtd, v_bhtd = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_btc).chunk(3, dim=-1)
        )
        y_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return self.out(y_bhtd.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """A two-layer MLP, four times wider inside, with a GELU: [b, t, c] -> [b, t, c]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Both linear layers and the GELU, [b, t, c] -> [b, t, c]."""
        return self.down(F.gelu(self.up(x_btc), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer, [b, t, c] -> [b, t, c]; the unit that FlatFSDP wraps."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Attention and MLP, each with a norm before it and a residual around it."""
        x_btc = x_btc + self.attention(self.norm_attention(x_btc))
        return x_btc + self.mlp(self.norm_mlp(x_btc))


class GPT(nn.Module):
    """The whole model; the same `seed` gives the same FP32 parameters on every rank."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Makes weights normal and biases zero; at every width, layers keep the scale of their input."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                # Well above GPT-2's 0.02, by which the first norm would divide, multiplying the gradient by
                # 50.
                module.weight.normal_(0.0, 0.5, generator=generator)
            if isinstance(module, nn.Linear):
                std = 0.5 / module.in_features**0.5
                if name.endswith(("attention.out", "mlp.down")):
                    # Two branches per layer write to the residual stream; their sum must not grow with depth.
                    std /= (2 * self.config.layers) ** 0.5
                module.weight.normal_(0.0, std, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """Returns the mean cross-entropy in nats (FP32) if there are targets, else the logits [b, t, v].

        Raises:
            ValueError: if the sequence is longer than `config.seq`.
        """
        positions_t = self.config.positions_of(tokens_bt)
        x_btc = self.tokens(tokens_bt) + self.positions(positions_t)
        for block in self.blocks:
            x_btc = block(x_btc)
        return _logits_or_loss(self.head(self.norm(x_btc)), targets_bt)


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
        return _logits_or_loss(self.head(self.norm(x_btc)), targets_bt)


def _logits_or_loss(logits_btv: Tensor, targets_bt: Tensor | None) -> Tensor:
    """The mean cross-entropy if there are targets, else the logits.

    It is in FP32 whatever the compute dtype: in bf16 the sum of 256 exponentials would lose the loss's last
    digits.
    """
    if targets_bt is None:
        return logits_btv
    return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten())
