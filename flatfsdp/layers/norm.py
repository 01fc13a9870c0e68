"""`LayerNorm`, `RMSNorm`, `L2Normalization`: one kernel forward, one backward, FP32 sums of weight gradients.

In:   [..., *normalized_shape], FP32, fp16 or bf16;  out: the same shape and dtype.
Next: `kernels/norm/forward.py` and `kernels/norm/backward.py`; `normalized.py` for norms before a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.contract.tensor_parallel import declare_whole
from flatfsdp.fp8.state_dict import WithoutExtraState
from flatfsdp.kernels.norm.forward import norm_forward
from flatfsdp.layers.calls import INPUT_DTYPES
from flatfsdp.layers.normalized import NormKind, normalize_backward, reset_norm
from flatfsdp.layers.shared import Declaring, new_parameter
from flatfsdp.torch_private import once_differentiable


class _NormLayer(WithoutExtraState, Declaring):
    """Base of `LayerNorm` and `RMSNorm`."""

    normalization: ClassVar[str]

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        *,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        self.kind = NormKind.named(self.normalization, eps, zero_centered_gamma)
        self.normalized_shape = _shape(type(self).__name__, normalized_shape, hidden_size)
        self.weight = new_parameter(*self.normalized_shape, dtype=params_dtype, device=device)
        self.bias = None
        if not self.kind.rms:
            self.bias = new_parameter(*self.normalized_shape, dtype=params_dtype, device=device)
        for parameter in self.parameters():
            declare_whole(parameter, partial_grad=sequence_parallel)
        self.reset_parameters()

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Does nothing, because every rank has the whole norm; for loops over all layers of a model."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the gain to 1 and the bias to 0."""
        reset_norm(self.weight, self.bias, self.kind.zero_centered)

    def forward(self, inp: Tensor) -> Tensor:
        """Normalizes [..., *normalized_shape], FP32, fp16 or bf16, to the same shape and dtype.

        Raises:
            ValueError: if the last dimensions or the dtype do not fit.
        """
        if inp.dtype not in INPUT_DTYPES:
            raise ValueError(f"{type(self).__name__}: the input is {inp.dtype}, not FP32, fp16 or bf16")
        if inp.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__}: the input is {tuple(inp.shape)}, not [..., *{self.normalized_shape}]"
            )
        bias = None if self.bias is None else self.bias.flatten()
        return norm(inp, self.weight.flatten(), bias, self.kind)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.kind.eps}, zero_centered_gamma={self.kind.zero_centered}"


class LayerNorm(_NormLayer):
    """Layer normalization, y = (x - mean) / sqrt(variance + eps) * weight + bias.  Drop-in for nn.LayerNorm.

    The arguments are Transformer Engine's.  Parameters and input may have different dtypes; the result has
    the input's, also under torch.autocast.

    Args:
        normalized_shape: the last dimensions, which are normalized together; an int for a single one.
        eps: added to the variance; 0 is allowed.
        sequence_parallel: has no effect on the computation; marks the parameters (attribute of that name) so
            that their gradients are summed over the tensor-parallel ranks.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        zero_centered_gamma: the gain is 1 + weight, and the weight starts at 0.
        device: device of the parameters; "meta" to initialise them later with `reset_parameters`.
        hidden_size: another name for `normalized_shape`.

    Attributes:
        weight, bias: parameters of shape `normalized_shape`.

    Raises:
        ValueError: if not exactly one of `normalized_shape` and `hidden_size` is given.
    """

    normalization = "LayerNorm"


class RMSNorm(_NormLayer):
    """Root-mean-square normalization, y = x / sqrt(mean of x^2 + eps) * weight.

    It has no bias; the arguments are those of `LayerNorm`.
    """

    normalization = "RMSNorm"


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


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> Tensor:
    """Normalizes the last n elements of x (one or several last dimensions); differentiable once.

    Args:
        x: [..., n], or with n elements in its last dimensions together.
        weight: [n]; may have another dtype than x.
        bias: like `weight`, or None.
        kind: LayerNorm or RMSNorm, with its epsilon.
    """
    return _Norm.apply(x, weight, bias, kind)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> Tensor:
        rows = _rows(x, weight)
        result = norm_forward(
            rows, weight, bias, eps=kind.eps, rms=kind.rms, zero_centered=kind.zero_centered
        )
        ctx.kind = kind
        ctx.save_for_backward(rows, weight, result.mean, result.rstd)
        assert result.out is not None
        return result.out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = normalize_backward(_rows(dy, weight), x, weight, mean, rstd, ctx.kind, None)
        return dx.view(dy.shape), dweight, dbias, None


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """A contiguous matrix of x with one row for each normalization."""
    return x.reshape(-1, weight.numel()).contiguous()


def _shape(
    layer: str, normalized_shape: int | Sequence[int] | None, hidden_size: int | None
) -> tuple[int, ...]:
    if (normalized_shape is None) == (hidden_size is None):
        raise ValueError(f"{layer}: give either normalized_shape or its alias hidden_size")
    shape = hidden_size if normalized_shape is None else normalized_shape
    return (shape,) if isinstance(shape, int) else tuple(shape or ())
