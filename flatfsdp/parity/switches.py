"""Switches that must not change a bit of any model's training.

In:   a `Sharding` of a model.
Out:  the sharding with a switch off and on.
Next: `any_model.py` trains with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from torch import nn

from flatfsdp.fp8 import Recipe
from flatfsdp.policy import Precision


@dataclass(frozen=True)
class Sharding:
    """Settings by which a model is sharded and computed.

    Attributes:
        recipe: recipe of `fp8.autocast` around each step; None without FP8.
        fuses: fusion of weight gradients in layers that support it; None leaves layers as they are.
        replays: run microbatches as CUDA graphs.
    """

    precision: Precision = field(default_factory=Precision)
    recipe: Recipe | None = None
    flag: bool = True
    in_place: bool = False
    reshard: bool = True
    fuses: Literal["two_pass", True] | None = None
    replays: bool = False


class ModelSwitch(str, Enum):
    """Switches, none of which may change a bit.

    flag: `optimize_backward_concat`; in_place: sharded in place, or wrapped; reshard: parameters resharded
    after forward (ZeRO-3), or not (ZeRO-2); fusion: weight gradients added in the GEMM, or after it, in
    FP32; storage: weights in FP8 in the flat buffers, or cast by each layer; replay: microbatches as CUDA
    graphs, or eager.
    """

    flag = "flag"
    in_place = "in-place"
    reshard = "reshard"
    fusion = "fusion"
    storage = "storage"
    replay = "replay"

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the two runs, off and on."""
        names = {
            ModelSwitch.flag: ("flag off", "flag on"),
            ModelSwitch.in_place: ("wrapped", "in place"),
            ModelSwitch.reshard: ("not resharded", "resharded"),
            ModelSwitch.fusion: ("two passes", "fused"),
            ModelSwitch.storage: ("16-bit weights", "FP8 weights"),
            ModelSwitch.replay: ("eager", "replayed"),
        }
        return names[self]

    def applied(self, usual: Sharding) -> tuple[Sharding, Sharding]:
        """Returns the sharding with the switch off and on."""
        changes: dict[ModelSwitch, tuple[dict[str, Any], dict[str, Any]]] = {
            ModelSwitch.flag: ({"flag": False}, {"flag": True}),
            ModelSwitch.in_place: ({"in_place": False}, {"in_place": True}),
            ModelSwitch.reshard: ({"reshard": False}, {"reshard": True}),
            ModelSwitch.fusion: ({"fuses": "two_pass"}, {"fuses": True}),
            ModelSwitch.storage: (
                {"precision": replace(usual.precision, fp8_weights="in_layers")},
                {"precision": usual.precision},
            ),
            ModelSwitch.replay: ({"replays": False}, {"replays": True}),
        }
        off, on = changes[self]
        return replace(usual, **off), replace(usual, **on)

    def why_not(self, model: nn.Module, usual: Sharding, on_gpus: bool) -> str | None:
        """Reason why the switch makes no difference to this model; None if it does."""
        if self is ModelSwitch.fusion and next(fusing(model), None) is None:
            return "no layer of the model can fuse its weight gradients (flatfsdp.layers, convert, fuse)"
        if self is ModelSwitch.storage and usual.precision.fp8_weights is None:
            return "no weights are stored in FP8 (Precision(fp8_weights=...))"
        if self is ModelSwitch.replay and not on_gpus:
            return "on CPUs microbatches are not replayed"
        return None


def fusing(model: nn.Module) -> Iterator[Any]:
    """The layers that can fuse their weight gradients."""
    return (module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation"))
