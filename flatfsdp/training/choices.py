"""Names of the choices for a training run, with their values in the library.

In:   a word of the command line.
Out:  dtypes, recipes and options of layers.
"""

from __future__ import annotations

from enum import Enum

import torch

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.options import Precision


class PrecisionName(str, Enum):
    """Dtype of GEMMs; parameters, accumulation and reduction are always FP32.

    In a GPT, the first two use plain PyTorch layers, the others FlatFSDP's own; a Llama always has FlatFSDP's
    own, so bf16 and bf16-fused are the same.  With fp8-weights, flat buffers hold FP8 weights and GEMMs are
    those of fp8-current; with the other FP8 choices each layer casts its own weights.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_fused = "bf16-fused"
    fp8_delayed = "fp8-delayed"
    fp8_current = "fp8-current"
    fp8_block = "fp8-block"
    fp8_weights = "fp8-weights"

    @property
    def compute(self) -> torch.dtype:
        """Dtype of GEMMs outside of FP8 layers."""
        return torch.float32 if self is PrecisionName.fp32 else torch.bfloat16

    @property
    def has_own_layers(self) -> bool:
        """Whether a GPT uses FlatFSDP's own layers."""
        return self not in (PrecisionName.fp32, PrecisionName.bf16)

    @property
    def recipe(self) -> Recipe | None:
        """FP8 recipe; None without FP8."""
        recipes: dict[PrecisionName, Recipe] = {
            PrecisionName.fp8_delayed: DelayedScaling(amax_history_len=16),
            PrecisionName.fp8_current: CurrentScaling(),
            PrecisionName.fp8_block: BlockScaling(),
            PrecisionName.fp8_weights: CurrentScaling(),
        }
        return recipes.get(self)

    def dtypes(self, fp8_weights: bool = False) -> Precision:
        """Dtypes of parameters, compute, gradients and buffers.

        Args:
            fp8_weights: keep FP8 weights in the flat buffers with other recipes, too.
        """
        stored = fp8_weights or self is PrecisionName.fp8_weights
        return Precision(compute=self.compute, fp8_weights=CurrentScaling() if stored else None)


class Fusion(str, Enum):
    """Accumulation of weight gradients in FlatFSDP's own layers.

    off: autograd passes them on, rounded to the compute dtype; two_pass: an FP32 GEMM, then an addition;
    fused: the GEMM itself accumulates.
    """

    off = "off"
    two_pass = "two-pass"
    fused = "fused"

    @property
    def option(self) -> FuseWgrad:
        """The value of `fuse_wgrad_accumulation`."""
        return "two_pass" if self is Fusion.two_pass else self is Fusion.fused


class Strategy(str, Enum):
    """Extent of sharding: nothing (dp), gradients and optimizer (zero2), or parameters as well (zero3)."""

    dp = "dp"
    zero2 = "zero2"
    zero3 = "zero3"
