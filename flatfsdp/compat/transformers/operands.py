"""Weights of several projections as one operand, and which of them an engine may keep in FP8.

In:   projections of transformers, perhaps inside of LoRA.
Out:  joints for the engine, and what it has made of them for the GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatfsdp.contract.joint import Joint, joined
from flatfsdp.contract.operand import FP8_WEIGHTS
from flatfsdp.kernels.gemm.gemm import ALIGNMENT


def joints_of(name: str, bases: Sequence[Any]) -> tuple[Joint, ...]:
    """Their weights one below the other, and their biases if they have any."""
    kinds = ("weight",) if bases[0].bias is None else ("weight", "bias")
    return tuple(Joint(f"{name}_{kind}", tuple((each, kind) for each in bases)) for kind in kinds)


def operands_of(layer: nn.Module, joints: Sequence[Joint]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias for one GEMM; None if the weights are not side by side.

    Args:
        joints: see `joints_of`.
    """
    weight = joined(layer, joints[0])
    if weight is None:
        return None
    if len(joints) == 1:
        return weight, None
    bias = joined(layer, joints[1])
    return weight, torch.cat(joints[1].tensors()) if bias is None else bias


class Multiplying(Protocol):
    """A layer that multiplies with the weights of modules inside of it."""

    def multiplied(self) -> Iterable[nn.Module]:
        """Those whose weights nothing but its FP8 GEMMs reads."""


class _StoredBy:
    """The `fp8_weights` of a projection, whose weight the layer around it multiplies with."""

    def __init__(self, layer: Multiplying, module: nn.Module) -> None:
        self._layer, self._module = layer, module

    def __call__(self) -> tuple[str, ...]:
        weight: Any = self._module.weight
        suits = all(size > 0 and size % ALIGNMENT == 0 for size in weight.shape)
        is_read = any(each is self._module for each in self._layer.multiplied())
        return ("weight",) if suits and is_read else ()


def declare_stored(layer: Multiplying, modules: Iterable[nn.Module]) -> None:
    """Lets an engine ask the projections themselves whether it may keep their weights in FP8."""
    for module in modules:
        FP8_WEIGHTS.leave(module, _StoredBy(layer, module))


def undeclare_stored(modules: Iterable[nn.Module]) -> None:
    """Takes back `declare_stored`."""
    for module in modules:
        vars(module).pop(FP8_WEIGHTS.name, None)
