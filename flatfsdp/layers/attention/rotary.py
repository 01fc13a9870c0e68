"""Rotary position embedding (RoPE): tables of angles, and the rotation of queries and keys.

Element pair i of a head at position s rotates by s / rotary_base^(2 i / dim); Su et al., RoFormer (2021).

Next: `kernels/attention/rope.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.kernels.attention.rope import rope
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.torch_private import once_differentiable


class RotaryTables(NamedTuple):
    """Cosines and sines, FP32 [positions, dim / 2], and whether they are for interleaved pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class RotaryPositionEmbedding(nn.Module):
    """Makes the RoPE tables and keeps one pair for each device; no parameters, no buffers.

    Tables stay in FP32 when the module is cast and are not in the state_dict.  One module may serve all
    layers: pass its result as their `rotary_pos_emb`.

    Args:
        dim: rotated elements of a head, an even number.
        rotary_base: wavelengths are 2 pi to 2 pi * rotary_base positions.
        interleaved: the tables are for pairs of neighbouring elements instead of pairs from the two halves.

    Raises:
        ValueError: if dim is odd or too small.
    """

    @takes_te_arguments
    def __init__(self, dim: int, *, rotary_base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim}; elements turn in pairs, so it has to be even and at least 2")
        self.dim = dim
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, max_seq_len: int, device: torch.device | str | None = None) -> RotaryTables:
        """Tables for positions 0 to max_seq_len - 1.

        Args:
            max_seq_len: number of positions.
            device: where the tables are needed; default: torch's default device.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        tables = self._tables.get(device)
        if tables is None or tables[0].shape[0] < max_seq_len:
            # A power of two, so that growing sequences rarely need new tables.
            length = 1 << max(0, max_seq_len - 1).bit_length()
            tables = self._tables[device] = _make_tables(length, self.dim, self.rotary_base, device)
        cos, sin = tables
        return RotaryTables(cos[:max_seq_len], sin[:max_seq_len], self.interleaved)

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        return f"{self.dim}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"


def _make_tables(length: int, dim: int, rotary_base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    # Not inference tensors: an evaluation may make them, and training may use them next.
    with torch.inference_mode(False), torch.no_grad():
        # FP32 angles would be off by 0.004 at position 10^5.
        position = torch.arange(length, dtype=torch.float64, device=device)
        frequency = rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.outer(position, frequency)
        return angle.cos().float(), angle.sin().float()


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, batch_first: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotates queries or keys by their positions; differentiable once in x.

    Args:
        x: [seq, batch, heads, dim], or [batch, seq, heads, dim] if `batch_first`; FP32, fp16 or bf16; may be
            a slice of a packed projection.
        cos: FP32 [at least seq, n], contiguous; the first 2 n <= dim elements of each head are rotated.
        sin: the shape of `cos`.
        batch_first: whether the batch is the first dimension.
        interleaved: pairs are neighbouring elements instead of one from each half.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    return _Rotary.apply(x, cos, sin, batch_first, interleaved)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, batch_first: bool, interleaved: bool
    ) -> Tensor:
        ctx.way = way = {"batch_first": batch_first, "interleaved": interleaved}
        ctx.save_for_backward(cos, sin)
        return rope(_dense(x), cos, sin, **way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return rope(_dense(dy), *ctx.saved_tensors, **ctx.way, inverse=True), None, None, None, None


def _dense(x: Tensor) -> Tensor:
    """A tensor with a last stride of 1, which the kernel needs: x, or a copy."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
