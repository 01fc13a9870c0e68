"""FP8: recipes, the autocast region, recompute, and conversion of existing models."""

from flatfsdp.fp8.autocast import autocast, fp8_autocast
from flatfsdp.fp8.convert import convert
from flatfsdp.fp8.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Recipe,
    SplitAccumulator,
)
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
    "convert",
    "fp8_autocast",
]
