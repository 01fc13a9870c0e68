"""Calls of linear maps, whoever has the parameters: of our layers, or of a model of another library.

In:   an owner, which has scales, exchanges and casts; parameters as arguments; an input [..., features].
Out:  what `nodes/` computes.
Next: `linear.py`, `layernorm_linear.py` and `layernorm_mlp.py` call these with parameters of their own.

A call of an owner begins with `prepare`, once for all of its maps; with delayed scaling that is when scales
move on.

    casts = prepare(owner, inp, fc1, fc2)
    out, _, summed = norm_mlp(owner, norm, fc1, fc2, inp, casts, "swiglu", residual=residual)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flatfsdp.fp8.casts import Casts
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


def prepare(owner: MatmulLayer, inp: Tensor, *maps: MapOf) -> list[Casts]:
    """How a call of `owner` casts, for each of its maps.

    Args:
        inp: of the first map; [..., features].
        maps: all of `owner.linear_maps`, in their order.

    Raises:
        ValueError: if a size does not suit FP8.
        RuntimeError: if the device has no FP8.
    """
    casts = owner.casts(inp.device)
    if casts[0].recipe is not None:
        tokens = owner.exchanges.get(maps[0].name, UNSPLIT).tokens(inp.shape[:-1].numel())
        for name, weight, _ in maps:
            out_features, in_features = weight.shape
            require_fp8_shape(owner, name, tokens, in_features, out_features)
    return casts


def linear(
    owner: MatmulLayer, of: MapOf, inp: Tensor, casts: Casts, *, is_first_microbatch: bool | None = None
) -> Tensor:
    """x w^T + b: [..., in_features] to [..., out_features].

    Args:
        casts: of this map; see `prepare`.
        is_first_microbatch: see `Linear.forward`.

    Raises:
        ValueError, TypeError, RuntimeError: see `Linear.forward`.
    """
    x, leading = input_matrix(owner, inp, of)
    operand, call = owner.prepare_map(of, casts, x.dtype, is_first_microbatch, (inp,))
    out: Tensor = LinearNode.apply(x, of.weight, of.bias, operand, call)
    return out.view(*leading, of.weight.shape[0])


def norm_linear(
    owner: MatmulLayer,
    norm: NormOf,
    of: MapOf,
    inp: Tensor,
    casts: Casts,
    *,
    residual: Tensor | None = None,
    keep: bool = False,
    is_first_microbatch: bool | None = None,
) -> Called:
    """norm(x) w^T + b, or norm(x + residual) w^T + b: [..., in_features] to [..., out_features].

    Args:
        residual: of inp's shape.
        keep: whether norm(x) is asked for, too.
        casts, is_first_microbatch: as `linear`.

    Raises:
        ValueError, TypeError, RuntimeError: see `Linear.forward`.
    """
    x, leading = input_matrix(owner, inp, of)
    added = residual_matrix(residual, inp, x.dtype, owner)
    sources = (inp, residual, norm.weight, norm.bias)
    operand, call = owner.prepare_map(of, casts, x.dtype, is_first_microbatch, sources)
    spec = NormLinearSpec(norm.kind, call, keep)
    out, normalized, summed = NormLinearNode.apply(
        x, added, norm.weight, norm.bias, of.weight, of.bias, operand, spec
    )
    return Called(out.view(*leading, of.weight.shape[0]), normalized, summed)


def norm_mlp(
    owner: MatmulLayer,
    norm: NormOf,
    fc1: MapOf,
    fc2: MapOf,
    inp: Tensor,
    casts: Sequence[Casts],
    activation: str,
    *,
    residual: Tensor | None = None,
    keep: bool = False,
    checkpoint: bool = False,
    is_first_microbatch: bool | None = None,
) -> Called:
    """fc2(activation(fc1(norm(x)))), or norm(x + residual): [..., hidden] to the same shape.

    Args:
        casts: of both maps; see `prepare`.
        activation: a name in `flatfsdp.kernels.activation.NAMES`.
        checkpoint: see `LayerNormMLP`.
        residual, keep, is_first_microbatch: as `norm_linear`.

    Raises:
        ValueError, TypeError, RuntimeError: see `Linear.forward`.
    """
    x, _ = input_matrix(owner, inp, fc1)
    added = residual_matrix(residual, inp, x.dtype, owner)
    before_fc1 = (inp, residual, norm.weight, norm.bias)
    before_fc2 = (*before_fc1, fc1.weight, fc1.bias)
    fc1_weight, fc1_call = owner.prepare_map(fc1, casts[0], x.dtype, is_first_microbatch, before_fc1)
    fc2_weight, fc2_call = owner.prepare_map(fc2, casts[1], x.dtype, is_first_microbatch, before_fc2)
    out, normalized, summed = NormMLPNode.apply(
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
    return Called(out.view(inp.shape), normalized, summed)


def input_matrix(owner: MatmulLayer, inp: Tensor, of: MapOf) -> tuple[Tensor, tuple[int, ...]]:
    """The input as [tokens, in_features], contiguous, in the dtype of the activations; and the shape of the
    map's result, without its last dimension."""
    x = as_matrix(inp, of.weight.shape[1], activation_dtype(inp, owner, of.weight), owner)
    exchange = owner.exchanges.get(of.name, UNSPLIT)
    return x, exchange.leading_shape(type(owner).__name__, inp.shape)
