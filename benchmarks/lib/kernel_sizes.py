"""Sizes of real layers, at which kernels are measured, and of a tiny one.

Next: `kernel_cases.py` makes a case of each kernel at these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases; a small one only shows that they run.

    Attributes:
        hidden, qkv, ffn, gated: columns of activations; `gated` is both halves of a gated ffn.
        weights: [out, in] of one layer.
        shards: numel of one rank's shard of each weight of a layer.
        gemms: [out, in] of the weight gradients that are timed, by name.
        history: length of the amax histories of `scales` tensors.
        rotation: bytes that calls go through before they return to the same data.
    """

    tokens: int
    hidden: int
    wide_hidden: int
    qkv: int
    ffn: int
    gated: int
    head_dim: int
    vocabulary: int
    weights: tuple[tuple[int, int], ...]
    shards: tuple[int, ...]
    gemms: dict[str, tuple[int, int]]
    history: int
    scales: int
    rotation: int


LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *((28672, 8192),) * 3)
RANKS_70B = 4
FULL = Sizes(
    tokens=8192,
    hidden=4096,
    wide_hidden=8192,
    qkv=12288,
    ffn=16384,
    gated=28672,
    head_dim=128,
    vocabulary=128256,
    weights=LLAMA_8B,
    shards=tuple(out * inner // RANKS_70B for out, inner in LLAMA_70B),
    gemms={"gate_up": (28672, 4096), "down": (4096, 14336), "out": (4096, 4096)},
    history=1024,
    scales=768,
    rotation=256 << 20,
)
TINY = Sizes(
    tokens=48,
    hidden=64,
    wide_hidden=80,
    qkv=192,
    ffn=96,
    gated=128,
    head_dim=16,
    vocabulary=100,
    weights=((32, 64), (48, 16)),
    shards=(1024, 16, 80),
    gemms={"square": (64, 64), "wide": (32, 96)},
    history=4,
    scales=10,
    rotation=0,
)
