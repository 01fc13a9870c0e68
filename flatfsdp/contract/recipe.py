"""FP8 recipes: the source of scales, the format of each tensor, the accumulation of GEMMs.

They are plain frozen values, with Transformer Engine's names where it has the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from flatfsdp.contract.foreign_words import RECIPES, answering


class Format(Enum):
    """FP8 formats of forward tensors (activations, weights) and of gradients."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    # Gradients span more magnitudes than activations, and need the exponent bit more than the mantissa's.
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    def __init__(self, forward: torch.dtype, backward: torch.dtype) -> None:
        self.forward = forward
        self.backward = backward

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")


@dataclass(frozen=True)
class SplitAccumulator:
    """Whether a GEMM's partial sums are promoted to FP32 every 128 elements.

    Otherwise they stay in the tensor core's accumulator of about 14 bits.
    """

    fprop: bool = False
    dgrad: bool = True
    wgrad: bool = True

    def __post_init__(self) -> None:
        for gemm, is_split in vars(self).items():
            _check_bool(gemm, is_split)


@answering(RECIPES)
@dataclass(frozen=True)
class DelayedScaling:
    """Per-tensor scales from the amaxes of earlier steps: no pass over the data before the cast.

    scale = fp8_max / amax / 2^margin, where amax is the largest of the last `amax_history_len` updates, or
    the latest one.  An amax of 0, infinity or NaN keeps the scale.  Before the first update, tensors are cast
    with their own scale, as in current scaling, rather than with Transformer Engine's scale of 1, which loses
    most of a small gradient.

    Attributes:
        margin: the scale is divided by 2^margin.
        fp8_format: E4M3 forward and E5M2 backward (HYBRID), or E4M3 for both.
        amax_history_len: number of updates remembered.
        amax_compute_algo: "max" or "most_recent".
        reduce_amax: take the maximum over the ranks of autocast's amax_reduction_group.
        power_of_two_scales: round scales down to powers of two.  Then scaling changes no mantissa, and weight
            gradients accumulated inside the GEMM are bit-equal to a GEMM and an addition; with other scales
            the number of roundings differs by one.
        split_accumulator: which GEMMs promote partial sums to FP32.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    power_of_two_scales: bool = True
    split_accumulator: SplitAccumulator = SplitAccumulator()

    def __post_init__(self) -> None:
        _check_common(self)
        _check_bool("reduce_amax", self.reduce_amax)
        if not isinstance(self.margin, int | float) or not math.isfinite(self.margin):
            raise ValueError(f"margin is {self.margin!r}; scales are divided by 2^margin: make it a number")
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len!r}; it must be an integer >= 1")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is {self.amax_compute_algo!r}, not 'max' or 'most_recent'")


@answering(RECIPES)
@dataclass(frozen=True)
class CurrentScaling:
    """Per-tensor scales from the data itself: one more pass over it, no state.

    Attributes:
        amax_epsilon: smallest amax; smaller ones are raised to it.
        fp8_format: E4M3 forward and E5M2 backward (HYBRID), or E4M3 for both.
        power_of_two_scales: round scales down to powers of two.
        split_accumulator: which GEMMs promote partial sums to FP32.
    """

    fp8_format: Format = Format.HYBRID
    amax_epsilon: float = 0.0
    power_of_two_scales: bool = True
    split_accumulator: SplitAccumulator = SplitAccumulator()

    def __post_init__(self) -> None:
        _check_common(self)
        if not isinstance(self.amax_epsilon, int | float) or not self.amax_epsilon >= 0:
            raise ValueError(f"amax_epsilon is {self.amax_epsilon!r}; it must be a number >= 0")


@answering(RECIPES)
@dataclass(frozen=True)
class BlockScaling:
    """One scale per 1 x 128 run of activations and gradients and per 128 x 128 block of weights, in E4M3.

    Partial sums are always promoted to FP32 (`split_accumulator` is on for all three GEMMs).  Hopper GPUs
    only.
    """

    fp8_format: Format = Format.E4M3
    power_of_two_scales: bool = True
    split_accumulator: SplitAccumulator = SplitAccumulator(fprop=True)

    def __post_init__(self) -> None:
        _check_common(self)
        if self.fp8_format is not Format.E4M3:
            raise ValueError(f"fp8_format is {self.fp8_format!r}; block scaling is defined for Format.E4M3")
        if not all(vars(self.split_accumulator).values()):
            raise ValueError("block scaling applies scales between partial sums, so all of them are split")


Recipe = DelayedScaling | CurrentScaling | BlockScaling


def _check_common(recipe: Recipe) -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise ValueError(f"fp8_format is {recipe.fp8_format!r}; it must be Format.HYBRID or Format.E4M3")
    if not isinstance(recipe.split_accumulator, SplitAccumulator):
        raise ValueError(f"split_accumulator is {recipe.split_accumulator!r}; pass SplitAccumulator(...)")
    _check_bool("power_of_two_scales", recipe.power_of_two_scales)
