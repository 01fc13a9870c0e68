"""One GPT layer, step by step from plain PyTorch to FP8, with FlatFSDP's layers in place of PyTorch's.

    1  torch.nn.Linear and torch.nn.LayerNorm
    2  flatfsdp.layers.Linear and LayerNorm, one for one
    3  LayerNormLinear and LayerNormMLP, which fuse a norm with what follows it
    4  TransformerLayer, which contains everything
    5  the same TransformerLayer with FP8 GEMMs

Every step takes over the first one's weights; outputs are compared with the first one's, and the mean time of
forward and backward is printed.

    python examples/quickstart.py                 # on a GPU: hidden 4096, sequence 2048, batch 4
    python examples/quickstart.py --device cpu    # small sizes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
)

# Shapes in names: s = sequence, b = batch, c = hidden, h = heads, d = hidden / heads.


class PlainLayer(nn.Module):
    """Step 1: only PyTorch."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.ln2 = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x_sbc: Tensor) -> Tensor:
        """Runs the layer."""
        qkv = self.qkv(self.ln1(x_sbc)).unflatten(-1, (self.heads, 3, -1))
        q_bhsd, k_bhsd, v_bhsd = (part.permute(1, 2, 0, 3) for part in qkv.unbind(-2))
        y_bhsd = F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True)
        x_sbc = x_sbc + self.proj(y_bhsd.permute(2, 0, 1, 3).flatten(-2))
        return x_sbc + self.fc2(F.gelu(self.fc1(self.ln2(x_sbc)), approximate="tanh"))


class OneForOne(nn.Module):
    """Step 2: the same parts from FlatFSDP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = LayerNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention = DotProductAttention(heads, hidden // heads)
        self.proj = Linear(hidden, hidden)
        self.ln2 = LayerNorm(hidden)
        self.fc1 = Linear(hidden, 4 * hidden)
        self.fc2 = Linear(4 * hidden, hidden)

    def forward(self, x_sbc: Tensor) -> Tensor:
        """Runs the layer."""
        q_sbhd, k_sbhd, v_sbhd = self.qkv(self.ln1(x_sbc)).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        x_sbc = x_sbc + self.proj(self.attention(q_sbhd, k_sbhd, v_sbhd))
        return x_sbc + self.fc2(F.gelu(self.fc1(self.ln2(x_sbc)), approximate="tanh"))


class Joined(nn.Module):
    """Step 3: norms fused with the linear maps that follow them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layernorm_qkv = LayerNormLinear(hidden, 3 * hidden)
        self.attention = DotProductAttention(heads, hidden // heads)
        self.proj = Linear(hidden, hidden)
        self.layernorm_mlp = LayerNormMLP(hidden, 4 * hidden)

    def forward(self, x_sbc: Tensor) -> Tensor:
        """Runs the layer."""
        q_sbhd, k_sbhd, v_sbhd = self.layernorm_qkv(x_sbc).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        x_sbc = x_sbc + self.proj(self.attention(q_sbhd, k_sbhd, v_sbhd))
        return x_sbc + self.layernorm_mlp(x_sbc)


def transformer_layer(hidden: int, heads: int) -> TransformerLayer:
    """Step 4: one module."""
    return TransformerLayer(
        hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True
    )


JOINED_NAMES = {
    "ln1.": "layernorm_qkv.layer_norm_",
    "qkv.": "layernorm_qkv.",
    "proj.": "proj.",
    "ln2.": "layernorm_mlp.layer_norm_",
    "fc1.": "layernorm_mlp.fc1_",
    "fc2.": "layernorm_mlp.fc2_",
}
"""The names of the plain layer's parameters in `Joined`, by their first part."""


def joined_state(plain: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The plain layer's parameters under the names of `Joined`; `prefix` precedes those of attention."""
    state = {}
    for name, tensor in plain.state_dict().items():
        old = next(part for part in JOINED_NAMES if name.startswith(part))
        new = JOINED_NAMES[old] + name.removeprefix(old)
        state[new if new.startswith("layernorm_mlp") else prefix + new] = tensor
    return state


Context = Callable[[], AbstractContextManager[Any]]


def mean_ms(layer: nn.Module, x_sbc: Tensor, dy_sbc: Tensor, context: Context, steps: int) -> float:
    """Mean milliseconds of forward and backward, after as many steps to warm up."""

    def run() -> float:
        if x_sbc.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            layer.zero_grad()
            with context():
                y_sbc = layer(x_sbc)
            y_sbc.backward(dy_sbc)
        if x_sbc.is_cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / steps

    run()
    return run()


def distance(y_sbc: Tensor, reference_sbc: Tensor) -> float:
    """The relative Frobenius distance."""
    return float((y_sbc.float() - reference_sbc.float()).norm() / reference_sbc.float().norm())


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda"
    if torch.cuda.is_available()
    else "cpu",
    hidden: Annotated[int | None, typer.Option(help="Default: 4096 on a GPU, 128 on a CPU.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: 32 on a GPU, 4 on a CPU.")] = None,
    seq: Annotated[int | None, typer.Option(help="Default: 2048 on a GPU, 64 on a CPU.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps to average over.")] = 10,
) -> None:
    """One GPT layer from plain PyTorch to FP8: the same weights, outputs compared, times printed.

    For example:

    python examples/quickstart.py --device cpu

    python examples/quickstart.py --hidden 1024 --seq 512
    """
    on_gpu = device == "cuda"
    hidden = hidden or (4096 if on_gpu else 128)
    heads = heads or (32 if on_gpu else 4)
    seq = seq or (2048 if on_gpu else 64)
    torch.manual_seed(0)
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    x_sbc = torch.randn(seq, batch, hidden, requires_grad=True)
    dy_sbc = torch.randn(seq, batch, hidden)

    plain = PlainLayer(hidden, heads)
    one_for_one = OneForOne(hidden, heads)
    one_for_one.load_state_dict(plain.state_dict())
    joined = Joined(hidden, heads)
    joined.load_state_dict(joined_state(plain))
    whole = transformer_layer(hidden, heads)
    whole.load_state_dict(joined_state(plain, "self_attention."))
    recipe = DelayedScaling(amax_history_len=16)

    def fp8() -> AbstractContextManager[Any]:
        return autocast(recipe=recipe)

    contestants: list[tuple[str, nn.Module, Context]] = [
        ("1  plain PyTorch", plain, nullcontext),
        ("2  Linear, LayerNorm", one_for_one, nullcontext),
        ("3  LayerNormLinear, LayerNormMLP", joined, nullcontext),
        ("4  TransformerLayer", whole, nullcontext),
        ("5  TransformerLayer, FP8", whole, fp8),
    ]
    table = Table(
        "layer",
        "ms, forward + backward",
        "distance of the output",
        title=f"{device}, hidden {hidden}, sequence {seq}, batch {batch}, bf16",
    )
    for name, layer, context in contestants:
        ms = mean_ms(layer, x_sbc, dy_sbc, context, steps)
        # After the timing, because delayed scaling finds its scales in the first steps.
        with torch.no_grad(), context():
            far = distance(layer(x_sbc), plain(x_sbc))
        table.add_row(name, f"{ms:.2f}", f"{far:.1e}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
