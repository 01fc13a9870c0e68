"""Calls of linear maps, with parameters of our own layers or of another library's model.

In:   an owner with scales, exchanges and casts; parameters as arguments; an input [..., features].
Out:  the results of `nodes/`.
Next: `linear.py`, `layernorm_linear.py` and `layernorm_mlp.py` call these with their own parameters.

An owner's call begins with `prepare`, once for all of its maps:

    ready = prepare(owner, inp, qkv, proj)
    mixed, _, summed = norm_linear(owner, norm, qkv, ready)
    out = linear(owner, proj, ready.of_next(owner, proj, attend(mixed)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.fp8.casts import Casts
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.checks import require_fp8_shape
from flatfsdp.layers.inputs import activation_dtype, as_matrix, residual_matrix
from flatfsdp.layers.nodes.linear import LinearNode
from flatfsdp.layers.nodes.norm_linear import NormLinearNode, NormLinearSpec
from flatfsdp.layers.nodes.norm_mlp import NormMLPNode, NormMLPSpec
from flatfsdp.layers.normalized import NormKind
from flatfsdp.matmul.exchange import UNSPLIT


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
    """The checked input of one of an owner's maps, and the casts of the call.

    Attributes:
        inp: [..., in_features], as passed by the caller.
        x: [tokens, in_features], contiguous, in the dtype of the activations.
        leading: shape of the map's result without its last dimension.
        casts: of this map and the following ones.
        added: number of rows appended to `x` as copies of its last row, because FP8 GEMMs need multiples of
            16 tokens.  They change no amax, and their gradients are zero.
    """

    inp: Tensor
    x: Tensor
    leading: tuple[int, ...]
    casts: list[Casts]
    added: int = 0

    def of_next(self, owner: MatmulLayer, of: MapOf, inp: Tensor) -> CallInput:
        """Prepares the input of the owner's next map in the same call.

        Raises:
            ValueError, TypeError: if the input's shape or dtype does not fit, or a size does not suit FP8.
        """
        return prepare(owner, inp, of, casts=self.casts[1:])

    def padded(self, rows: Tensor | None) -> Tensor | None:
        """Appends to another matrix of the same tokens as many rows as `x` got."""
        return rows if rows is None or not self.added else _with_rows(rows, self.added)

    def unpadded(self, rows: Tensor) -> Tensor:
        """Removes the appended rows from a result."""
        return rows.narrow(0, 0, rows.shape[0] - self.added) if self.added else rows


def prepare(owner: MatmulLayer, inp: Tensor, *maps: MapOf, casts: list[Casts] | None = None) -> CallInput:
    """Checks the input of a call and decides how the call casts.

    With delayed scaling, a training forward counts as one use of the owner's scales, which roll afterwards:
    once a call, and only if the input is valid.

    Args:
        owner: the layer.
        inp: input of the first map, [..., in_features].
        maps: all of `owner.linear_maps`, in order.
        casts: those of the maps, if the call has begun (`CallInput.of_next`).

    Raises:
        ValueError, TypeError: if the input's shape or dtype does not fit, or a size does not suit FP8.
        RuntimeError: if the device has no FP8.
    """
    weight = maps[0].weight
    features = weight.shape[0 if maps[0].transposed else 1]
    x = as_matrix(inp, features, activation_dtype(inp, owner, weight), owner)
    exchanges = [owner.exchanges.get(of.name, UNSPLIT) for of in maps]
    leading = exchanges[0].leading_shape(type(owner).__name__, inp.shape)
    if casts is None:
        casts = owner.casts(inp.device)
    if casts[0].recipe is None:
        return CallInput(inp, x, leading, casts)
    # With one matrix split by rows over ranks, rows appended on one rank would lie in the middle of it.
    added = 0 if any(each.splits_rows for each in exchanges) else -x.shape[0] % ALIGNMENT
    if added:
        x = _with_rows(x, added)
    tokens = exchanges[0].tokens(x.shape[0])
    for name, weight, _, transposed in maps:
        out_features, in_features = weight.shape
        if transposed:
            out_features, in_features = in_features, out_features
        require_fp8_shape(owner, name, tokens, in_features, out_features)
    return CallInput(inp, x, leading, casts, added)


def linear(
    owner: MatmulLayer, of: MapOf, ready: CallInput, *, is_first_microbatch: bool | None = None
) -> Tensor:
    """One linear map, x w^T + b: [..., out_features].

    Args:
        owner: the layer.
        of: the linear map.
        ready: its input, from `prepare` or `CallInput.of_next`.
        is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every time.

    Raises:
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of the weight is kept.
    """
    inp, x, leading, casts, _ = ready
    operand, call = owner.prepare_map(of, casts[0], x.dtype, is_first_microbatch, (inp,))
    out = ready.unpadded(LinearNode.run(x, of.weight, of.bias, operand, call))
    return out.view(*leading, out.shape[1])


def norm_linear(
    owner: MatmulLayer,
    norm: NormOf,
    of: MapOf,
    ready: CallInput,
    *,
    residual: Tensor | None = None,
    keep: bool = False,
    is_first_microbatch: bool | None = None,
) -> Called:
    """A norm and a linear map: norm(x) w^T + b, or norm(x + residual) w^T + b, [..., out_features].

    Args:
        owner: the layer.
        norm: the norm.
        of: the linear map.
        ready: its input, from `prepare`.
        residual: added to the input before the norm; of the input's shape.
        keep: whether to return norm(x) as well.
        is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every time.

    Raises:
        ValueError: if the residual has another shape.
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of the weight is kept.
    """
    inp, x, leading, casts, _ = ready
    added = ready.padded(residual_matrix(residual, inp, x.dtype, owner))
    sources = (inp, residual, norm.weight, norm.bias)
    operand, call = owner.prepare_map(of, casts[0], x.dtype, is_first_microbatch, sources)
    spec = NormLinearSpec(norm.kind, call, keep)
    results = NormLinearNode.run(x, added, norm.weight, norm.bias, of.weight, of.bias, operand, spec)
    return _called(ready, results, leading)


def norm_mlp(
    owner: MatmulLayer,
    norm: NormOf,
    fc1: MapOf,
    fc2: MapOf,
    ready: CallInput,
    activation: str,
    *,
    residual: Tensor | None = None,
    keep: bool = False,
    checkpoint: bool = False,
    is_first_microbatch: bool | None = None,
) -> Called:
    """A norm and an MLP: fc2(activation(fc1(norm(x)))), or with norm(x + residual), in the input's shape.

    Args:
        owner: the layer.
        norm: the norm.
        fc1: the first linear map.
        fc2: the second linear map.
        ready: input of fc1, from `prepare`.
        activation: a name in `flatfsdp.kernels.activation.NAMES`.
        residual: added to the input before the norm; of the input's shape.
        keep: whether to return norm(x) as well.
        checkpoint: save only the input, and recompute norm, fc1 and activation in backward.
        is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts every
            time.

    Raises:
        ValueError: if the residual has another shape.
        TypeError: if is_first_microbatch is not None, True or False.
        RuntimeError: if no usable cast of a weight is kept.
    """
    inp, x, _, casts, _ = ready
    added = ready.padded(residual_matrix(residual, inp, x.dtype, owner))
    before_fc1 = (inp, residual, norm.weight, norm.bias)
    before_fc2 = (*before_fc1, fc1.weight, fc1.bias)
    fc1_weight, fc1_call = owner.prepare_map(fc1, casts[0], x.dtype, is_first_microbatch, before_fc1)
    fc2_weight, fc2_call = owner.prepare_map(fc2, casts[1], x.dtype, is_first_microbatch, before_fc2)
    results = NormMLPNode.run(
        x,
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
    return _called(ready, results, inp.shape[:-1])


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
