"""Calls of linear maps, whoever has the parameters: of our layers, or of a model of another library.

In:   an owner, which has scales, exchanges and casts; parameters as arguments; an input [..., features].
Out:  what `nodes/` computes.
Next: `linear.py`, `layernorm_linear.py` and `layernorm_mlp.py` call these with parameters of their own.

A call of an owner begins with `prepare`, once for all of its maps:

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
    """

    weight: Tensor
    bias: Tensor | None
    kind: NormKind


class Called(NamedTuple):
    """What a call that begins with a norm gives.

    Attributes:
        out: [..., out_features].
        normalized: norm(x), [tokens, features]; None if it is not asked for.
        summed: what was normalized, [tokens, features].  Its gradient is added inside the norm's backward, so
            that it is what a residual connection around the call should take.
    """

    out: Tensor
    normalized: Tensor | None
    summed: Tensor


class CallInput(NamedTuple):
    """The input of one map of an owner, checked; and how the call casts.

    Attributes:
        inp: [..., in_features], as it was given.
        x: [tokens, in_features], contiguous, in the dtype of the activations.
        leading: the shape of the map's result, without its last dimension.
        casts: of this map and those that follow.
        added: rows at the end of `x` that repeat the last one: FP8 GEMMs need multiples of 16 tokens.  They
            change no amax, and their gradients are zero.
    """

    inp: Tensor
    x: Tensor
    leading: tuple[int, ...]
    casts: list[Casts]
    added: int = 0

    def of_next(self, owner: MatmulLayer, of: MapOf, inp: Tensor) -> CallInput:
        """The input of the owner's next map, in the same call.

        Raises:
            ValueError, TypeError: see `Linear.forward`.
        """
        return _ready(owner, (of,), inp, _matrix(owner, of, inp), self.casts[1:])

    def padded(self, rows: Tensor | None) -> Tensor | None:
        """Another matrix of the same tokens, with the rows that `x` has."""
        return rows if rows is None or not self.added else _with_rows(rows, self.added)

    def unpadded(self, rows: Tensor) -> Tensor:
        """A result, without those rows."""
        return rows.narrow(0, 0, rows.shape[0] - self.added) if self.added else rows


def prepare(owner: MatmulLayer, inp: Tensor, *maps: MapOf) -> CallInput:
    """Checks the input of a call, and says how the call casts.

    With delayed scaling a forward that trains counts as a use of the owner's scales, which move on after it:
    once a call, and only where the input is right.

    Args:
        inp: of the first map: [..., in_features].
        maps: all of `owner.linear_maps`, in their order.

    Raises:
        ValueError, TypeError, RuntimeError: see `Linear.forward`.
    """
    matrix = _matrix(owner, maps[0], inp)
    return _ready(owner, maps, inp, matrix, owner.casts(inp.device))


def linear(
    owner: MatmulLayer, of: MapOf, ready: CallInput, *, is_first_microbatch: bool | None = None
) -> Tensor:
    """x w^T + b, [..., out_features].

    Args:
        is_first_microbatch: see `Linear.forward`.

    Raises:
        TypeError, RuntimeError: see `Linear.forward`.
    """
    inp, x, leading, casts, _ = ready
    operand, call = owner.prepare_map(of, casts[0], x.dtype, is_first_microbatch, (inp,))
    out = ready.unpadded(LinearNode.apply(x, of.weight, of.bias, operand, call))
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
    """norm(x) w^T + b, or norm(x + residual) w^T + b, [..., out_features].

    Args:
        residual: of the input's shape.
        keep: whether norm(x) is asked for, too.
        is_first_microbatch: as `linear`.

    Raises:
        ValueError: if the residual has another shape.
        TypeError, RuntimeError: see `Linear.forward`.
    """
    inp, x, leading, casts, _ = ready
    added = ready.padded(residual_matrix(residual, inp, x.dtype, owner))
    sources = (inp, residual, norm.weight, norm.bias)
    operand, call = owner.prepare_map(of, casts[0], x.dtype, is_first_microbatch, sources)
    spec = NormLinearSpec(norm.kind, call, keep)
    results = NormLinearNode.apply(x, added, norm.weight, norm.bias, of.weight, of.bias, operand, spec)
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
    """fc2(activation(fc1(norm(x)))), or norm(x + residual), in the input's shape.

    Args:
        activation: a name in `flatfsdp.kernels.activation.NAMES`.
        checkpoint: see `LayerNormMLP`.
        residual, keep, is_first_microbatch: as `norm_linear`.

    Raises:
        ValueError, TypeError, RuntimeError: as `norm_linear`.
    """
    inp, x, _, casts, _ = ready
    added = ready.padded(residual_matrix(residual, inp, x.dtype, owner))
    before_fc1 = (inp, residual, norm.weight, norm.bias)
    before_fc2 = (*before_fc1, fc1.weight, fc1.bias)
    fc1_weight, fc1_call = owner.prepare_map(fc1, casts[0], x.dtype, is_first_microbatch, before_fc1)
    fc2_weight, fc2_call = owner.prepare_map(fc2, casts[1], x.dtype, is_first_microbatch, before_fc2)
    results = NormMLPNode.apply(
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


def _ready(
    owner: MatmulLayer,
    maps: Sequence[MapOf],
    inp: Tensor,
    matrix: tuple[Tensor, tuple[int, ...]],
    casts: list[Casts],
) -> CallInput:
    """The input of the first of these maps, as its GEMMs read it."""
    x, leading = matrix
    if casts[0].recipe is None:
        return CallInput(inp, x, leading, casts)
    exchanges = [owner.exchanges.get(of.name, UNSPLIT) for of in maps]
    # Where ranks have rows of one matrix each, those at the end of a rank's would be in the midst.
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


def _with_rows(rows: Tensor, added: int) -> Tensor:
    """A matrix with its last row once more, `added` times."""
    return torch.cat([rows, rows[-1:].expand(added, -1)])


def _matrix(owner: MatmulLayer, of: MapOf, inp: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """`x` and `leading` of a `CallInput`."""
    x = as_matrix(
        inp, of.weight.shape[0 if of.transposed else 1], activation_dtype(inp, owner, of.weight), owner
    )
    exchange = owner.exchanges.get(of.name, UNSPLIT)
    return x, exchange.leading_shape(type(owner).__name__, inp.shape)
