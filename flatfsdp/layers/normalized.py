"""A norm whose result is the operand of a GEMM: cast in the norm's own kernel where the scale is known.

In:   [tokens, hidden], optionally a residual to add first, and the norm's parameters.
Out:  an `Operand`, and the result itself if requested; in backward the gradients.
Next: `linear.py` and `layernorm_mlp.py` begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.fp8.quantizers import Quantizer
from flatfsdp.kernels.norm.backward import NormBackward, norm_backward
from flatfsdp.kernels.norm.forward import NormForward, norm_forward
from flatfsdp.kernels.shared.outputs import Outputs
from flatfsdp.matmul.linear_map import LinearCall


@dataclass(frozen=True)
class NormKind:
    """The kind of a layer's norm.

    Attributes:
        eps: added to the variance or mean square.
        rms: RMSNorm, which has no bias, instead of LayerNorm.
        zero_centered: the gain is 1 + weight.
    """

    eps: float
    rms: bool
    zero_centered: bool

    @staticmethod
    def named(normalization: str, eps: float, zero_centered: bool) -> NormKind:
        """Looks up a norm by Transformer Engine's name.

        Raises:
            ValueError: for an unknown name.
        """
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization is {normalization!r}; it must be 'LayerNorm' or 'RMSNorm'")
        return NormKind(eps, normalization == "RMSNorm", zero_centered)


Result = TypeVar("Result", NormForward, Outputs)


def cast_by(
    kernel: Callable[..., Result],
    *inputs: Any,
    quantizer: Quantizer,
    columnwise: bool,
    keep: bool = False,
    **options: Any,
) -> tuple[Operand, Result]:
    """Computes the input of a GEMM and casts it: in the kernel itself if the scale is known before it runs.

    Args:
        kernel: the kernel.
        inputs: its inputs.
        quantizer: casts the result.
        columnwise: whether the GEMM needs a weight gradient.
        keep: whether the kernel returns `out` in any case.
        options: further arguments of the kernel.
    """
    fused = quantizer.fused
    if fused is not None:
        result = kernel(*inputs, high_precision=keep, columnwise=columnwise, **options, **fused)
        return quantizer.operand(result.rowwise, result.columnwise), result
    result = kernel(*inputs, high_precision=True, **options)
    assert result.out is not None
    return quantizer.cast(result.out, rowwise=True, columnwise=columnwise).operand, result


NormSaved = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""The input of a norm (x, or x + residual rounded to x's dtype), its weight, mean and rstd, for backward."""


def normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: NormKind,
    call: LinearCall,
    keep: bool,
) -> tuple[Operand, Tensor | None, NormSaved]:
    """Normalizes x, or x + residual, and casts the result for a linear map.

    Args:
        x: [tokens, hidden], contiguous.
        residual: added to x in the same pass; of x's shape and dtype.
        weight: gain of the norm, [hidden].
        bias: shift of the norm, [hidden]; None for RMSNorm.
        kind: LayerNorm or RMSNorm, with its epsilon.
        call: the linear map.
        keep: whether to return the result in x's dtype as well.
    """
    operand, result = cast_by(
        norm_forward,
        x,
        weight,
        bias,
        quantizer=call.input_quantizer,
        columnwise=call.wants_columnwise_input,
        keep=keep,
        eps=kind.eps,
        rms=kind.rms,
        zero_centered=kind.zero_centered,
        residual=residual,
    )
    # Not `result`: it would keep `out`, which may have been there for the cast only, in memory during GEMMs.
    return operand, result.out if keep else None, (result.summed, weight, result.mean, result.rstd)


def normalize_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    kind: NormKind,
    d_residual: Tensor | None,
) -> NormBackward:
    """Computes the gradients of a norm's input and parameters.

    Args:
        dy: gradient of the norm's result.
        x: the norm's input.
        weight: gain of the norm.
        mean: FP32 [tokens], from the forward; None for RMSNorm.
        rstd: FP32 [tokens], from the forward.
        kind: LayerNorm or RMSNorm, with its epsilon.
        d_residual: a gradient that reaches x past the norm; added in the same pass.
    """
    residual = None if d_residual is None else d_residual.to(x.dtype).contiguous()
    return norm_backward(
        dy.contiguous(),
        x,
        weight,
        mean,
        rstd,
        rms=kind.rms,
        zero_centered=kind.zero_centered,
        d_residual=residual,
    )


def input_grads(
    dy: Tensor | None,
    saved: Sequence[Tensor | None],
    kind: NormKind,
    d_residual: Tensor | None,
    *,
    has_residual: bool,
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of x, the residual, and the norm's weight and bias; None where none is needed.

    Args:
        dy: gradient of the norm's result, or None.
        saved: the norm's input, weight, mean and rstd; None where nothing before the GEMM is trained.
        kind: LayerNorm or RMSNorm, with its epsilon.
        d_residual: a gradient that reaches x past the norm, or None.
        has_residual: whether a residual was added to x and needs a gradient, which is that of x.
    """
    x, weight, mean, rstd = saved
    if dy is None or x is None:
        return d_residual, d_residual if has_residual else None, None, None
    assert weight is not None and rstd is not None
    grads = normalize_backward(dy, x, weight, mean, rstd, kind, d_residual)
    return grads.dx, grads.dx if has_residual else None, grads.dweight, grads.dbias


def add_to(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Adds two gradients of one tensor, either of which may be missing."""
    if grad is None or other is None:
        return grad if other is None else other
    return grad + other


@torch.no_grad()
def reset_norm(weight: Tensor, bias: Tensor | None, zero_centered: bool) -> None:
    """Sets the gain to 1 and the shift to 0."""
    if not weight.is_meta:
        weight.fill_(0.0 if zero_centered else 1.0)
        if bias is not None:
            bias.zero_()
