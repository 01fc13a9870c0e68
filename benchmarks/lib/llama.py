"""A plain Llama without any parallelism, which the training benchmarks shard.

In:   tokens and targets, int64 [b, t]; or, in a model without a vocabulary, activations [b, t, c].
Out:  the loss, FP32, 0-dim.
Next: `step.py` makes a unit of each `Layer`, and one of the rest.

Shapes in names: b = batch, t = sequence, c = hidden, h = query heads, g = key/value heads, n = any number of
heads, d = hidden / heads, v = vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Backends of attention, best first on Hopper; torch 2.11 defaults to flash attention, at half the speed."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model.

    Attributes:
        ffn: width of the gate and of the up projection each.
        kv_heads: key/value heads, each shared by heads / kv_heads query heads.
        seq: longest sequence, in tokens.
        vocab: 0 for layers alone: no embedding, final norm or head; the input is activations.
            loss: computed from the logits, or from the last layer's output without a vocabulary.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    seq: int
    vocab: int = 0
    loss: Literal["cross-entropy", "mean-square"] = "cross-entropy"
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden is {self.hidden}; it must be an even multiple of heads, {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}")
        if not self.vocab and self.loss == "cross-entropy":
            raise ValueError("cross-entropy needs a vocab; without one, loss must be 'mean-square'")

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def _two_layers_of_70b(seq: int, vocab: int = 0) -> LlamaConfig:
    return LlamaConfig(2, 8192, 28672, 64, 8, seq, vocab, "mean-square")


SHAPES: dict[str, LlamaConfig] = {
    "8b": LlamaConfig(32, 4096, 14336, 32, 8, seq=8192, vocab=128_256),
    "1b": LlamaConfig(16, 2048, 8192, 32, 8, seq=8192, vocab=128_256),
    "70b-l2": _two_layers_of_70b(seq=2048),
    "70b-l2-s1k": _two_layers_of_70b(seq=1024),
    "70b-l2-vocab": _two_layers_of_70b(seq=2048, vocab=32_000),
    "70b-l2-s1k-vocab": _two_layers_of_70b(seq=1024, vocab=32_000),
    "tiny": LlamaConfig(3, 64, 160, 4, 2, seq=32, vocab=96),
    "tiny-l2": LlamaConfig(2, 64, 160, 4, 2, seq=32, loss="mean-square"),
}
"""Sizes by the names that the benchmarks use; the tiny ones are for tests on CPU."""


def matmul_weights(config: LlamaConfig) -> int:
    """Number of elements of all weights that a token is multiplied with: the layers' and the head's."""
    attention = config.hidden * (config.qkv_width + config.hidden)
    mlp = 3 * config.hidden * config.ffn
    return config.layers * (attention + mlp) + config.hidden * config.vocab


def flops_per_token(config: LlamaConfig) -> int:
    """Operations of a forward and backward, per token of a sequence of `config.seq`.

    They are 6 per GEMM weight (a multiply and an add, in forward, dgrad and wgrad), plus causal attention: 6
    * layers * hidden * seq, half of attention without a mask.  Embedding, norms, the optimizer and
    recomputation do not count.
    """
    return 6 * matmul_weights(config) + 6 * config.layers * config.hidden * config.seq


class RMSNorm(nn.Module):
    """RMS normalization over the last dimension, x / rms(x) * weight: [..., c] -> [..., c]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, FP32, both [t, 1, d / 2] (arXiv:2104.09864)."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(config.seq), config.rope_theta**-exponents).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x_btnd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + d / 2]) by its position's angle i; the tables are in x's dtype."""
    first, second = x_btnd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with shared key/value heads, [b, t, c] -> [b, t, c].

    Args:
        rope: result of `rope_tables`, shared by the layers of one model.
    """

    def __init__(self, config: LlamaConfig, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.qkv = nn.Linear(config.hidden, config.qkv_width, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", rope[0], persistent=False)
        self.register_buffer("sin", rope[1], persistent=False)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Projects, rotates, attends and projects back."""
        t, h, g = x_btc.shape[1], self.heads, self.kv_heads
        # Split, not slices: the backward of a split is one concat, that of slices fills with zeros and adds.
        qk_btnd, v_btgd = self.qkv(x_btc).unflatten(-1, (h + 2 * g, -1)).split((h + g, g), dim=2)
        # The tables are FP32 buffers, which not every engine casts to the compute dtype.
        qk_btnd = rotate(qk_btnd, self.cos[:t].to(qk_btnd.dtype), self.sin[:t].to(qk_btnd.dtype))
        q_bhtd, k_bgtd = qk_btnd.transpose(1, 2).split((h, g), dim=1)
        y_bhtd = F.scaled_dot_product_attention(
            q_bhtd, k_bgtd, v_btgd.transpose(1, 2), is_causal=True, enable_gqa=g < h
        )
        return self.out(y_bhtd.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Gated MLP, down(silu(gate(x)) * up(x)), with gate and up in one weight: [b, t, c] -> [b, t, c]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Applies the gated MLP."""
        gate, up = self.gate_up(x_btc).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """One pre-norm transformer layer, [b, t, c] -> [b, t, c]; the unit that is sharded."""

    def __init__(self, config: LlamaConfig, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config)
        self.attention = Attention(config, rope)
        self.norm_mlp = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Applies attention and MLP, each with a norm before it and a residual around it."""
        x_btc = x_btc + self.attention(self.norm_attention(x_btc))
        return x_btc + self.mlp(self.norm_mlp(x_btc))


class Llama(nn.Module):
    """The whole model with its loss; built on torch's default device from torch's default generator."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        rope = rope_tables(config)
        self.tokens = nn.Embedding(config.vocab, config.hidden) if config.vocab else None
        self.layers = nn.ModuleList(Layer(config, rope) for _ in range(config.layers))
        self.norm = RMSNorm(config) if config.vocab else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False) if config.vocab else None
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Makes embeddings standard normal and weights narrow, and smaller if they add to the residual."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                adds = name.endswith(("attention.out", "mlp.down"))
                module.weight.normal_(0.0, 0.02 / (2 * self.config.layers) ** 0.5 if adds else 0.02)

    def forward(self, inputs: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """The mean loss in FP32; `targets_bt` only for cross-entropy, in nats."""
        x_btc = inputs if self.tokens is None else self.tokens(inputs)
        # Around the layers instead of inside, so that compiled layers do not see it.
        with sdpa_kernel(ATTENTION, set_priority=True) if x_btc.is_cuda else nullcontext():
            for layer in self.layers:
                x_btc = layer(x_btc)
        if self.norm is not None and self.head is not None:
            x_btc = self.head(self.norm(x_btc))
        return mean_loss(self.config, x_btc, targets_bt)


def mean_loss(config: LlamaConfig, y: Tensor, targets_bt: Tensor | None) -> Tensor:
    """Mean loss of logits or activations [b, t, ...], in FP32 whatever the compute dtype.

    In bf16 a sum over a vocabulary would lose the loss's last digits.
    """
    if config.loss == "mean-square":
        return y.float().square().mean()
    assert targets_bt is not None
    return F.cross_entropy(y.float().flatten(0, 1), targets_bt.flatten())
