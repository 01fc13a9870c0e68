"""FP8 training: recipes, autocast, quantizers, scaling state, activation checkpointing, overflow counts."""

from flatfsdp.contract.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Recipe,
    SplitAccumulator,
)
from flatfsdp.fp8.autocast import autocast, fp8_autocast
from flatfsdp.fp8.overflows import Overflows, count_overflows
from flatfsdp.fp8.recompute import checkpoint

Float8CurrentScaling, Float8BlockScaling = CurrentScaling, BlockScaling
"""Transformer Engine's names of these recipes."""

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Overflows",
    "Recipe",
    "SplitAccumulator",
    "autocast",
    "checkpoint",
    "count_overflows",
    "fp8_autocast",
]
