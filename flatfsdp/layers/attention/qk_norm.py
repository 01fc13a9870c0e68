"""Norms of queries and keys over the elements of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatfsdp.fp8.state_dict import WithoutExtraState
from flatfsdp.layers.layer_options import AttentionOptions
from flatfsdp.layers.norm import LayerNorm, RMSNorm, norm
from flatfsdp.layers.normalized import NormKind


class L2Normalization(WithoutExtraState):
    """L2 normalization over the last dimension, y = x / sqrt(sum of x^2 + eps); no parameters.

    Args:
        channels: size of the last dimension.
        eps: added to the sum of squares.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        """Normalizes [..., channels], FP32, fp16 or bf16, to the same shape and dtype."""
        # RMSNorm divides by the root of the mean, which is sqrt(channels) smaller than that of the sum.
        gain = torch.full((self.channels,), self.channels**-0.5, dtype=torch.float32, device=inp.device)
        return norm(inp, gain, None, NormKind(self.eps / self.channels, rms=True, zero_centered=False))

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        return f"{self.channels}, eps={self.eps}"


def make_qk_norm(channels: int, options: AttentionOptions, *, is_split: bool) -> nn.Module | None:
    """Makes the norm of queries or keys that `options` ask for; None if they ask for none.

    Args:
        channels: elements of a head.
        options: the layer's options; only qk_norm_type, qk_norm_eps, params_dtype and device are read.
        is_split: whether tensor-parallel ranks share the heads, so that gradients have to be summed over
            them.

    Raises:
        ValueError: for an unknown type.
    """
    kind, eps = options.get("qk_norm_type"), options.get("qk_norm_eps", 1e-6)
    dtype, device = options.get("params_dtype"), options.get("device")
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(channels, eps)
    if kind == "RMSNorm":
        return RMSNorm(channels, eps, is_split, params_dtype=dtype, device=device)
    if kind == "LayerNorm":
        return LayerNorm(channels, eps, is_split, params_dtype=dtype, device=device)
    raise ValueError(f"qk_norm_type is {kind!r}, not None, 'L2Normalization', 'RMSNorm' or 'LayerNorm'")
