"""`autocast`: turns FP8 on, with a recipe, and updates the scales.

In:   `with autocast(recipe=...)` around a forward.
Out:  `current_region()`, which layers read in their forward; scales are updated at the exit of the outermost
      region (forward tensors) and at the end of each backward (gradients).
Next: `casts.py` makes quantizers from a region.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from flatfsdp.contract.recipe import DelayedScaling, Recipe
from flatfsdp.fp8.region import Region, current_region, current_stage, entered, sharing_scales


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Context in which layers of `flatfsdp.layers` run FP8 GEMMs; the backward may run outside.

        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            loss = model(tokens)
        loss.backward()

    With `DelayedScaling`, the forward's scales are updated when the outermost region ends, and the gradients'
    when a backward ends, with one all-reduce of a small vector each.  All ranks of the group have to run the
    same layers, and equally many regions and backwards.  Without gradients (evaluation) nothing is recorded.
    A forward that raises updates nothing.  If no layer inside can compute in FP8, it warns.  Capturing a step
    in a CUDA graph raises a RuntimeError, because replays would not see new scales.

    Args:
        enabled: False turns FP8 off inside.
        calibrating: with enabled=False: record amaxes for a later FP8 run while computing without FP8.
        recipe: default: DelayedScaling().
        amax_reduction_group: ranks that hold parts of the same tensors, such as all data-parallel ranks;
            default: all ranks, if torch.distributed is initialised; in the forward of a pipeline stage
            (`FlatStage`) the ranks with this stage.

    Raises:
        TypeError: if `recipe` is not a recipe, or was passed as `enabled` or `calibrating`.
        ValueError: in a pipeline stage, if amax_reduction_group has ranks of other stages: immediately around
            a step; after the step, on every rank, if it was entered in a forward.
    """
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False (a recipe is passed as recipe=)")
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {recipe!r}; pass a DelayedScaling, CurrentScaling or BlockScaling")
    outer = current_region()
    region = Region(recipe, enabled, calibrating and not enabled, sharing_scales(amax_reduction_group), outer)
    stage = current_stage()
    # At its end the region would wait for ranks of other stages, which wait for results of this one.
    if stage is not None:
        stage.confine(region)
    try:
        with entered(region):
            yield
    except BaseException:
        # Only if the error leaves the outermost region: a caller that catches it inside goes on with what was
        # recorded.
        if outer is None:
            region.forget()
        raise
    if outer is None:
        region.end_forward()
        if enabled and not region.has_layers:
            # Python shows it once for each place in the program.
            warnings.warn(
                "nothing in this fp8.autocast can compute in FP8, and all of it ran without: give the model "
                "layers of flatfsdp.layers, or convert its nn.Linear by flatfsdp.layers.convert(model)",
                # Of the `with` statement, behind contextlib.
                stacklevel=3,
            )


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """`autocast` with Transformer Engine's earlier argument names."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group):
        yield
