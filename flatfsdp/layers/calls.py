"""Calls of linear maps, with parameters of our own layers or of another library's model.

In:   an owner with scales, exchanges and casts; maps with its parameters; an input [..., features].
Out:  the results of `nodes/`.
Next: `linear.py` and `layernorm_mlp.py` call these with their own parameters.

An owner's call begins with `prepare`, once for all of its maps:

    ready = prepare(owner, inp, qkv, proj)
    mixed, _, summed = norm_linear(ready, norm)
    out = linear(ready.of_next(attend(mixed)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.contract.operand import Operand
from flatfsdp.fp8.casts import Casts
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.checks import require_fp8_shape
from flatfsdp.layers.nodes.linear import LinearNode, NormLinearNode
from flatfsdp.layers.nodes.norm_mlp import NormMLPNode, NormMLPSpec
from flatfsdp.layers.normalized import NormKind
from flatfsdp.matmul.exchange import UNSPLIT
from flatfsdp.matmul.linear_map import LinearCall


class NormOf(NamedTuple):
    """A norm in front of a linear map.

    Attributes:
        weight, bias: [features]; RMSNorm has no bias.
        kind: LayerNorm or RMSNorm, with its epsilon.
    """

    weight: Tensor
    bias: Tensor | None
    kind: NormKind


class Called(NamedTuple):
    """The results of a call that begins with a norm.

    Attributes:
        out: [..., out_features].
        normalized: norm(x), [tokens, features]; None if not requested.
        summed: the norm's input, [tokens, features].  A residual connection around the call should use it:
            its gradient is then added inside the norm's backward.
    """

    out: Tensor
    normalized: Tensor | None
    summed: Tensor


class CallInput(NamedTuple):
    """The checked input of the next of an owner's maps, and how the call casts.

    Attributes:
        owner: the layer.
        maps: this map and the following ones.
        casts: of these maps.
        inp: [..., in_features], as passed by the caller.
        x: [tokens, in_features], contiguous, in the dtype of the activations.
        leading: shape of the map's result without its last dimension.
        is_first_microbatch: the argument of `prepare`.
        added: number of rows appended to `x` as copies of its last row, because FP8 GEMMs need multiples of
            16 tokens.  They change no amax, and their gradients are zero.
    """

    owner: MatmulLayer
    maps: tuple[MapOf, ...]
    casts: list[Casts]
    inp: Tensor
    x: Tensor
    leading: tuple[int, ...]
    is_first_microbatch: bool | None
    added: int = 0

    def of_next(self, inp: Tensor) -> CallInput:
        """Prepares the input of the owner's next map in the same call.

        Raises:
            ValueError, TypeError: if the input's shape or dtype does not fit, or a size does not suit FP8.
        """
        maps, casts = self.maps[1:], self.casts[1:]
        return prepare(self.owner, inp, *maps, is_first_microbatch=self.is_first_microbatch, casts=casts)

    def prepared(self, index: int, sources: Sequence[Tensor | None]) -> tuple[Operand, LinearCall]:
        """Prepares one of the maps, whose input is computed from `sources` (`MatmulLayer.prepare_map`).

        Raises:
            TypeError: if is_first_microbatch is not None, True or False.
            RuntimeError: if no usable cast of the weight is kept.
        """
        return self.owner.prepare_map(
            self.maps[index], self.casts[index], self.x.dtype, self.is_first_microbatch, sources
        )

    def residual(self, residual: Tensor | None) -> Tensor | None:
        """The matrix to add to `x`, with as many rows.

        Raises:
            ValueError: if the residual has another shape than `inp`.
        """
        rows = residual_matrix(residual, self.inp, self.x.dtype, self.owner)
        return rows if rows is None or not self.added else _with_rows(rows, self.added)

    def unpadded(self, rows: Tensor) -> Tensor:
        """Removes the appended rows from a result."""
        return rows.narrow(0, 0, rows.shape[0] - self.added) if self.added else rows


def prepare(
    owner: MatmulLayer,
    inp: Tensor,
    *maps: MapOf,
    is_first_microbatch: bool | None = None,
    casts: list[Casts] | None = None,
) -> CallInput:
    """Checks the input of a call and decides how the call casts.

    With delayed scaling, a training forward counts as one use of the owner's scales, which roll afterwards:
    once a call, and only if the input is valid.

    Args:
        owner: the layer.
        inp: input of the first map, [..., in_features].
        maps: all of `owner.linear_maps`, in order.
        is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts every
            time.
        casts: those of the maps, if the call has begun (`CallInput.of_next`).

    Raises:
        ValueError, TypeError: if the input's shape or dtype does not fit, or a size does not suit FP8.
        RuntimeError: if the device has no FP8.
    """
    name, weight, _, transposed = maps[0]
    x = as_matrix(inp, weight.shape[0 if transposed else 1], activation_dtype(inp, owner, weight), owner)
    exchange = owner.exchanges.get(name, UNSPLIT)
    leading = exchange.leading_shape(type(owner).__name__, inp.shape)
    # After the input's shape and dtype are checked: with delayed scaling, this counts as a use of the scales.
    if casts is None:
        casts = owner.casts(inp.device)
    if casts[0].recipe is None:
        return CallInput(owner, maps, casts, inp, x, leading, is_first_microbatch)
    exchanges = [owner.exchanges.get(of.name, UNSPLIT) for of in maps]
    # With one matrix split by rows over ranks, rows appended on one rank would lie in the middle of it.
    added = 0 if any(each.splits_rows for each in exchanges) else -x.shape[0] % ALIGNMENT
    if added:
        x = _with_rows(x, added)
    tokens = exchange.tokens(x.shape[0])
    for name, weight, _, transposed in maps:
        out_features, in_features = weight.shape
        if transposed:
            out_features, in_features = in_features, out_features
        require_fp8_shape(owner, name, tokens, in_features, out_features)
    return CallInput(owner, maps, casts, inp, x, leading, is_first_microbatch, added)


def linear(ready: CallInput) -> Tensor:
    """One linear map, x w^T + b: [..., out_features].

    Args:
        ready: the map and its input, from `prepare` or `CallInput.of_next`.

    Raises:
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of the weight is kept.
    """
    operand, call = ready.prepared(0, (ready.inp,))
    of = ready.maps[0]
    out = ready.unpadded(LinearNode.run(ready.x, of.weight, of.bias, operand, call))
    return out.view(*ready.leading, out.shape[1])


def norm_linear(
    ready: CallInput, norm: NormOf, *, residual: Tensor | None = None, keep: bool = False
) -> Called:
    """A norm and a linear map: norm(x) w^T + b, or norm(x + residual) w^T + b, [..., out_features].

    Args:
        ready: the map and its input, from `prepare`.
        norm: the norm.
        residual: added to the input before the norm; of the input's shape.
        keep: whether to return norm(x) as well.

    Raises:
        ValueError: if the residual has another shape.
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of the weight is kept.
    """
    added = ready.residual(residual)
    operand, call = ready.prepared(0, (ready.inp, residual, norm.weight, norm.bias))
    of = ready.maps[0]
    results = NormLinearNode.run(
        ready.x, added, norm.weight, norm.bias, of.weight, of.bias, operand, norm.kind, call, keep
    )
    return _called(ready, results, ready.leading)


def norm_mlp(
    ready: CallInput,
    norm: NormOf,
    activation: str,
    *,
    residual: Tensor | None = None,
    keep: bool = False,
    checkpoint: bool = False,
) -> Called:
    """A norm and an MLP: fc2(activation(fc1(norm(x)))), or with norm(x + residual), in the input's shape.

    Args:
        ready: fc1, fc2 and the input, from `prepare`.
        norm: the norm.
        activation: a name in `flatfsdp.kernels.activation.NAMES`.
        residual: added to the input before the norm; of the input's shape.
        keep: whether to return norm(x) as well.
        checkpoint: save only the input, and recompute norm, fc1 and activation in backward.

    Raises:
        ValueError: if the residual has another shape.
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of a weight is kept.
    """
    added = ready.residual(residual)
    fc1, fc2 = ready.maps
    before_fc1 = (ready.inp, residual, norm.weight, norm.bias)
    fc1_weight, fc1_call = ready.prepared(0, before_fc1)
    fc2_weight, fc2_call = ready.prepared(1, (*before_fc1, fc1.weight, fc1.bias))
    results = NormMLPNode.run(
        ready.x,
        added,
        norm.weight,
        norm.bias,
        fc1.weight,
        fc1.bias,
        fc2.weight,
        fc2.bias,
        fc1_weight,
        fc2_weight,
        NormMLPSpec(norm.kind, activation, checkpoint, keep, fc1_call, fc2_call),
    )
    return _called(ready, results, ready.inp.shape[:-1])


def _called(
    ready: CallInput, results: tuple[Tensor, Tensor | None, Tensor], leading: Sequence[int]
) -> Called:
    out, normalized, summed = results
    out = ready.unpadded(out)
    kept = None if normalized is None else ready.unpadded(normalized)
    return Called(out.view(*leading, out.shape[1]), kept, ready.unpadded(summed))


def _with_rows(rows: Tensor, added: int) -> Tensor:
    """Appends the last row of a matrix `added` times."""
    return torch.cat([rows, rows[-1:].expand(added, -1)])


# ---- inputs as matrices -----------------------------------------------------------------------------------

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Activation dtypes that layers accept."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that torch.autocast casts to; None if it is off or does not know the device (meta)."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def activation_dtype(x: Tensor, layer: nn.Module, weight: Tensor) -> torch.dtype:
    """The dtype of a layer's input after torch.autocast, if that is on.

    Raises:
        TypeError: if GEMMs do not support the dtype, or it is not the weight's and torch.autocast is off.
    """
    cast_to = autocast_dtype(x.device.type)
    if cast_to is not None:
        return cast_to
    if x.dtype != weight.dtype or x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{type(layer).__name__}: the input is {x.dtype}, the weight {weight.dtype}; outside of "
            "torch.autocast both have to be FP32, fp16 or bf16 alike (params_dtype, or layer.to(dtype))"
        )
    return x.dtype


def as_matrix(inp: Tensor, features: int, dtype: torch.dtype, layer: nn.Module) -> Tensor:
    """Makes [..., features] a contiguous [tokens, features] in `dtype`.

    Raises:
        ValueError: if the last dimension has another size.
    """
    if inp.dim() == 0 or inp.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the last dimension of {tuple(inp.shape)} is not {features}"
        )
    if inp.dtype is not dtype:
        inp = inp.to(dtype)
    if inp.dim() != 2:
        # Without tokens, a -1 would be ambiguous.
        inp = inp.reshape(inp.numel() // features, features)
    return inp.contiguous()


def residual_matrix(
    residual: Tensor | None, inp: Tensor, dtype: torch.dtype, layer: nn.Module
) -> Tensor | None:
    """Makes the residual that is added to `inp` a matrix, like `as_matrix`.

    Raises:
        ValueError: if the two shapes differ.
    """
    if residual is None:
        return None
    if residual.shape != inp.shape:
        raise ValueError(
            f"{type(layer).__name__}: the residual has shape {tuple(residual.shape)}, not {tuple(inp.shape)}"
        )
    if residual.is_leaf and residual.requires_grad:
        # Both addends get the same gradient tensor.  Autograd stores it in a leaf's .grad without a copy if
        # it comes through a view, and a second backward would then add to both.
        residual = residual * 1
    return as_matrix(residual, inp.shape[-1], dtype, layer)
