"""8 bits: recipes, autocast, quantizers, scaling states, recompute with the same scales, and counts."""

from flatfsdp.fp8.autocast import autocast, fp8_autocast
from flatfsdp.fp8.overflows import Overflows, count_overflows
from flatfsdp.fp8.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, Recipe, SplitAccumulator
from flatfsdp.fp8.recompute import checkpoint

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Format",
    "Overflows",
    "Recipe",
    "SplitAccumulator",
    "autocast",
    "checkpoint",
    "count_overflows",
    "fp8_autocast",
]
