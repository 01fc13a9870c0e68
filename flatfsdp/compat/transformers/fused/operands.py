"""Weights of several projections as one operand, and which of them an engine may keep in FP8.

In:   projections of transformers, perhaps inside of LoRA.
Out:  joints for the engine, and what it has made of them for the GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.joint import Joint, joined
from flatfsdp.contract.operand import FP8_OPERAND
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


def require_readable(layer: str, modules: Iterable[Any]) -> None:
    """Checks that projections can be called as modules.

    Raises:
        RuntimeError: if an engine keeps the weight of one in FP8, which only GEMMs of ours read.
    """
    if any(FP8_OPERAND.of(getattr(each, "weight", each)) is not None for each in modules):
        raise RuntimeError(
            f"{layer} is left to transformers, and its weights are kept in FP8, which transformers cannot "
            "read; add hooks and adapters before the model is sharded, ask for no attention weights, or keep "
            "the weights in 16 bits (fp8_weights=None)"
        )


def stored_in_fp8(joints: Iterable[Joint]) -> tuple[str, ...]:
    """Names of weights that an engine may keep in FP8: those whose sizes suit FP8 GEMMs."""
    return tuple(
        joint.name
        for joint in joints
        if all(size > 0 and size % ALIGNMENT == 0 for part in joint.tensors() for size in part.shape)
    )
