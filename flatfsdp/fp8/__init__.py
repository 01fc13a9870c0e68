"""8 bits: recipes, the autocast region, quantizers, scaling states, and recompute with the same scales."""

from flatfsdp.fp8.autocast import autocast, fp8_autocast
from flatfsdp.fp8.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, Recipe, SplitAccumulator
from flatfsdp.fp8.recompute import checkpoint

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Format",
    "Recipe",
    "SplitAccumulator",
    "autocast",
    "checkpoint",
    "fp8_autocast",
]
