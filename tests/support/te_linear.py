"""A linear layer that handles its weight as Transformer Engine's do, which is not installed on CPUs.

Each forward makes an FP8 weight and its transpose, by delayed scaling, and autograd saves their parts.  The
scale moves on after each forward, and quantizing records an amax.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FP8 = torch.float8_e4m3fn


class Storage:
    """FP8 values, their transpose, and the inverse of their scale."""

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._data: Any = data
        self._transpose: Any = data.t().contiguous()
        self._scale_inv: Any = scale.reciprocal()

    def prepare_for_saving(self) -> tuple[list[Any], Storage]:
        tensors = [self._data, self._transpose, self._scale_inv]
        self._data = self._transpose = self._scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        self._data, self._transpose, self._scale_inv = tensors[:3]
        return tensors[3:]


class Quantizer:
    """Delayed scaling of one tensor."""

    def __init__(self, scale: Tensor, amax: Tensor) -> None:
        self.scale, self.amax = scale, amax

    def copy(self) -> Quantizer:
        return Quantizer(self.scale, self.amax)

    def quantize(self, tensor: Tensor) -> Any:
        return self.quantize_impl(tensor)

    def quantize_impl(self, tensor: Tensor) -> Any:
        self.amax.copy_(torch.maximum(self.amax, tensor.abs().max().float()))
        data = (tensor.float() * self.scale).clamp(-448, 448).to(FP8).view(torch.uint8)
        return Storage(data, self.scale)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantizer: Quantizer, kept: list[Any]) -> Tensor:
        fp8 = quantizer.quantize(weight)
        out = x @ (fp8._data.view(FP8).float() * fp8._scale_inv).to(x.dtype).t()
        tensors, ctx.fp8 = fp8.prepare_for_saving()
        kept[:] = map(weakref.ref, tensors[:2])
        ctx.save_for_backward(x, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        ctx.fp8.restore_from_saved(tensors)
        weight = ctx.fp8._transpose.view(FP8).float() * ctx.fp8._scale_inv
        return grad @ weight.to(grad.dtype).t(), grad.flatten(0, -2).t() @ x.flatten(0, -2), None, None


class QuantizedLinear(nn.Linear):
    """The layer, without bias; `saved_bytes` is what its last forward has saved of the FP8 weight."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)
        self.scale, self.amax = torch.ones(1), torch.zeros(1)
        self._kept: list[weakref.ref[Tensor]] = []

    def _get_weight_quantizers(self) -> list[Quantizer]:
        return [Quantizer(self.scale, self.amax)]

    @property
    def saved_bytes(self) -> int:
        alive = (reference() for reference in self._kept)
        return sum(tensor.untyped_storage().nbytes() for tensor in alive if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        (quantizer,) = self._get_weight_quantizers()
        out: Tensor = _Product.apply(x, self.weight, quantizer, self._kept)
        # As at the end of Transformer Engine's autocast, which moves all scales on.
        self.scale.copy_(448 / (2 * self.amax))
        self.amax.zero_()
        return out


@contextmanager
def transformer_engine_linear() -> Iterator[None]:
    """Context in which the layer claims to be Transformer Engine's."""
    before = QuantizedLinear.__module__
    QuantizedLinear.__module__ = "transformer_engine.pytorch.module.linear"
    try:
        yield
    finally:
        QuantizedLinear.__module__ = before
