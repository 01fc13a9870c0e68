"""Switches that must not change a bit of any model's training.

In:   a `Sharding` of a model.
Out:  the sharding with a switch off and on.
Next: `loop.py` trains with both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from flatfsdp.fp8 import Recipe
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.options import GradSync, Precision


@dataclass(frozen=True)
class Sharding:
    """Settings by which a model is sharded and computed; those after the first two have switches.

    Attributes:
        recipe: recipe of `fp8.autocast` around each step; None without FP8.
        flag: `optimize_backward_concat`.
        reshard: free parameters after use (ZeRO-3), or keep them for a step (ZeRO-2).
        fusion: fusion of weight gradients in layers that support it; None leaves layers as they are.
        cache: cast FP8 weights in the first microbatch of a step only.
        storage: whether flat buffers really are FP8 if `precision` has `fp8_weights`, or only packed as if.
        replay: run microbatches as CUDA graphs; on CPUs they are eager.
        sync: `grad_sync`.
    """

    precision: Precision = field(default_factory=Precision)
    recipe: Recipe | None = None
    flag: bool = True
    reshard: bool = True
    fusion: FuseWgrad | None = None
    cache: bool = False
    storage: bool = True
    replay: bool = False
    sync: GradSync = "last"

    @property
    def options(self) -> dict[str, Any]:
        """Options of `flatfsdp.shard`."""
        precision = self.precision
        if precision.fp8_weights is not None and not self.storage:
            precision = replace(precision, fp8_weights="in_layers")
        return {
            "precision": precision,
            "reshard_after_forward": self.reshard,
            "optimize_backward_concat": self.flag,
            "grad_sync": self.sync,
        }


class Switch(str, Enum):
    """Switches, none of which may change a bit.

    flag: `optimize_backward_concat`; reshard: parameters resharded after forward (ZeRO-3), or not (ZeRO-2);
    fusion: weight gradients added in the GEMM, or after it, in FP32; cache: FP8 weights cast in the first
    microbatch only, or in each, for models that take `is_first_microbatch`; storage: weights in FP8 in the
    flat buffers, or cast by each layer; replay: microbatches as CUDA graphs, or eager; sync: `grad_sync` is
    "every", or "last", whose sums are the same in a step of one microbatch.

    Attributes:
        ends: names of the two runs, off and on.
    """

    ends: tuple[str, str]

    flag = "flag", "flag off", "flag on"
    reshard = "reshard", "not resharded", "resharded"
    fusion = "fusion", "two passes", "fused"
    cache = "cache", "cast each", "cast once"
    storage = "storage", "16-bit weights", "FP8 weights"
    replay = "replay", "eager", "replayed"
    sync = "sync", "reduced last", "reduced each"

    def __new__(cls, name: str, off: str = "", on: str = "") -> Switch:
        """Makes a member whose value is its name."""
        member = str.__new__(cls, name)
        member._value_, member.ends = name, (off, on)
        return member

    def applied(self, usual: Sharding) -> tuple[Sharding, Sharding]:
        """Returns the sharding with the switch off and on."""
        if self is Switch.replay:
            # A cached weight has no address of its own, so it cannot be replayed.
            usual = replace(usual, cache=False)
        values: dict[Switch, tuple[Any, Any]] = {
            Switch.fusion: ("two_pass", True),
            Switch.sync: ("last", "every"),
        }
        off, on = ({self.name: value} for value in values.get(self, (False, True)))
        return replace(usual, **off), replace(usual, **on)

    def why_not(
        self, usual: Sharding, microbatches: int, *, on_gpus: bool, fuses: bool, caches: bool
    ) -> str | None:
        """Reason why the switch makes no difference; None if it does.

        Args:
            usual: sharding of the model.
            microbatches: number of microbatches in a step.
            on_gpus: whether it runs on GPUs.
            fuses: whether the model has layers that can fuse their weight gradients.
            caches: whether the model's forward takes `is_first_microbatch`.
        """
        is_stored = usual.precision.fp8_weights is not None
        if self is Switch.fusion and not fuses:
            return "no layer of the model can fuse its weight gradients (flatfsdp.layers, convert, fuse)"
        if self is Switch.cache and not caches:
            return "the model's forward does not take is_first_microbatch"
        if self is Switch.cache and (usual.recipe is None or is_stored or microbatches == 1):
            return "no layer casts FP8 weights in more than one microbatch of a step"
        if self is Switch.storage and not is_stored:
            return "no weights are stored in FP8 (Precision(fp8_weights=...))"
        if self is Switch.sync and microbatches > 1:
            return "gradients of several microbatches are added in another order"
        if self is Switch.replay and not on_gpus:
            return "on CPUs microbatches are not replayed"
        return None
