"""`Casts`: how the input, weight and gradient of a linear map are cast in one call.

In:   the recipe of the region around the call; with delayed scaling, the layer's scales, too.
Out:  `Casts`, with a quantizer for each of the three.
Next: `layers/base.py` passes them to the linear primitive; `quantizers.py` casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from flatfsdp.contract.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, SplitAccumulator
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.quantizers import Blockwise, Current, Delayed, Quantizer, Unquantized
from flatfsdp.fp8.recompute import Use
from flatfsdp.fp8.region import Region
from flatfsdp.kernels.cast.scaling import Scales


@dataclass(slots=True)
class Casts:
    """Quantizers for the tensors of one linear map in one call.

    Attributes:
        x: for the input.
        weight: for the weight.
        grad: makes the one for the output's gradient, in backward.
        split: which GEMMs use split accumulation.
        recipe: the recipe of these casts; None without FP8.
    """

    x: Quantizer
    weight: Quantizer
    grad: Callable[[], Quantizer]
    split: SplitAccumulator
    recipe: Recipe | None


WITHOUT_FP8 = Casts(Unquantized(), Unquantized(), Unquantized, SplitAccumulator(), None)


@cache
def stateless_casts(recipe: CurrentScaling | BlockScaling) -> Casts:
    """The casts of a recipe whose scales come from the tensors themselves."""
    if isinstance(recipe, CurrentScaling):
        forward, backward = (
            Current(dtype, recipe.amax_epsilon, recipe.power_of_two_scales)
            for dtype in (recipe.fp8_format.forward, recipe.fp8_format.backward)
        )
        return Casts(forward, forward, lambda: backward, recipe.split_accumulator, recipe)
    vectors = Blockwise("1x128", recipe.power_of_two_scales)
    squares = Blockwise("128x128", recipe.power_of_two_scales)
    return Casts(vectors, squares, lambda: vectors, recipe.split_accumulator, recipe)


def delayed_casts(
    region: Region,
    recipe: DelayedScaling,
    forward: Scaling,
    backward: Scaling,
    *,
    records: bool,
    use: Use | None,
) -> list[Casts]:
    """The casts of a layer's linear maps with delayed scaling.

    Args:
        region: the autocast around the call.
        recipe: its recipe.
        forward: scales of the inputs and weights: x, weight, x, weight, ...
        backward: scales of the gradients, one per map.  Tensors without a scale yet are cast with their own.
        records: whether this forward records amaxes.
        use: inside a checkpoint: the use of the layer that this call is.
    """
    # A kernel raises an amax that it is given, so an evaluation, or a recomputation, gives none.
    amaxes = forward.amaxes if records else (None,) * len(forward.amaxes)
    quantizers: list[Quantizer]
    if region.enabled:
        # A recomputation casts with the scales of the first run: other FP8 numbers would give other
        # activations than those that the loss is of.
        scales = forward.scales() if use is None else use.scales_of(forward)
        quantizers = _quantizers(recipe, recipe.fp8_format.forward, scales, amaxes)
    else:
        quantizers = [Unquantized(amax) for amax in amaxes]
    used = recipe if region.enabled else None
    return [
        Casts(
            quantizers[2 * i],
            quantizers[2 * i + 1],
            # Made in the backward: a gradient is cast with the scales that the last backward has left.
            partial(_grad_quantizer, region, recipe, backward, i),
            recipe.split_accumulator,
            used,
        )
        for i in range(len(backward.amaxes))
    ]


def _quantizers(
    recipe: DelayedScaling,
    dtype: torch.dtype,
    scales: Sequence[Scales],
    amaxes: Sequence[Tensor | None],
) -> list[Quantizer]:
    """One quantizer for each amax; without scales yet, each tensor is cast with its own."""
    if not scales:
        return [Current(dtype, 0.0, recipe.power_of_two_scales, recipe.margin, amax) for amax in amaxes]
    return [
        Delayed(dtype, scale, scale_inv, amax)
        for (scale, scale_inv), amax in zip(scales, amaxes, strict=True)
    ]


def _grad_quantizer(region: Region, recipe: DelayedScaling, backward: Scaling, index: int) -> Quantizer:
    """The quantizer of one gradient, in the backward that casts it."""
    if not region.enabled:
        return Unquantized()
    # Of the forward's region, which may be over: its group and its recipe hold for its backward.
    region.use_in_backward(backward)
    scales = backward.scales()[index : index + 1]
    return _quantizers(recipe, recipe.fp8_format.backward, scales, backward.amaxes[index : index + 1])[0]
