"""`FusedPart`: base of all mixins for transformers' classes, and `FusionState`, the state of a fused model.

Next: `layer.py`, `attention.py`, `mlp.py`, `head.py` and `small.py` derive from it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flatfsdp.compat.transformers.fused.families import Family, PartKind
from flatfsdp.contract.mixed import Mixed, innermost, made_again, mix, unmix
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.matmul.linear_map import FuseWgrad

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusionState:
    """The settings and log state of one fused model.

    Attributes:
        fp8: whether GEMMs inside the layers may be in FP8.
        fuse_wgrad_accumulation: the argument of `fuse`.
        head_chunk_tokens: the argument of `fuse`.
        speaks: whether to log anything.
        said: messages already logged.
        left_out: (family, part) pairs whose results the probe found to differ.
    """

    fp8: bool
    fuse_wgrad_accumulation: FuseWgrad
    head_chunk_tokens: int | None
    speaks: bool = True
    said: set[str] = field(default_factory=set)
    left_out: set[tuple[str, PartKind]] = field(default_factory=set)

    def say(self, what: str, reason: str) -> None:
        """Logs once that a part is left to transformers, and why."""
        text = f"{what} is computed by transformers, not fused: {reason}"
        if self.speaks and text not in self.said:
            self.said.add(text)
            logger.warning("%s", text)


class FusedPart(Mixed):
    """Mixin of a module of transformers that our kernels compute."""

    _fusion: FusionState
    _family: Family

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The reduction for copies and pickles, which stay fused."""
        state = dict(self.__getstate__() if isinstance(self, MatmulLayer) else vars(self))
        state.pop("_checked", None)
        return made_again(self, state)


def become(module: nn.Module, mixin: type[FusedPart], family: Family, fusion: FusionState) -> None:
    """Fuses one module in place."""
    mix(module, mixin)
    vars(module)["_fusion"], vars(module)["_family"] = fusion, family
    if isinstance(module, MatmulLayer):
        module._become(fuse_wgrad_accumulation=fusion.fuse_wgrad_accumulation)
        vars(module)["allows_fp8"] = fusion.fp8 and mixin.allows_fp8  # type: ignore[attr-defined]


def resign(module: nn.Module) -> None:
    """Restores transformers' own class of one module."""
    if isinstance(module, MatmulLayer):
        module._resign()
    for name in ("_fusion", "_family", "_checked", "allows_fp8", "overflow_counters"):
        vars(module).pop(name, None)
    unmix(module)


def is_fused(module: nn.Module) -> bool:
    """Whether `fuse` has changed this module."""
    return isinstance(module, FusedPart)


def name_of(module: nn.Module) -> str:
    """The name of the module's class as its user knows it."""
    name: str = innermost(type(module)).__name__
    return name
