"""Joint operands of several projections' weights, and which of them an engine may store in FP8.

In:   projections of transformers, possibly inside LoRA.
Out:  joints for the engine, and the operands that it made of them.
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
    """The joints of their weights, stacked by rows, and of their biases if they have any."""
    kinds = ("weight",) if bases[0].bias is None else ("weight", "bias")
    return tuple(Joint(f"{name}_{kind}", tuple((each, kind) for each in bases)) for kind in kinds)


def operands_of(layer: nn.Module, joints: Sequence[Joint]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and bias of one GEMM; None if the weights are not contiguous.

    Args:
        layer: the owner of the joints.
        joints: the result of `joints_of`.
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
        RuntimeError: if an engine stores the weight of one in FP8, which only our GEMMs read.
    """
    if any(FP8_OPERAND.of(getattr(each, "weight", each)) is not None for each in modules):
        raise RuntimeError(
            f"{layer} is left to transformers, but its weights are kept in FP8, which transformers cannot "
            "read; add hooks and adapters before the model is sharded, ask for no attention weights, or keep "
            "the weights in 16 bits (fp8_weights=None)"
        )


def stored_in_fp8(joints: Iterable[Joint]) -> tuple[str, ...]:
    """Names of weights that an engine may store in FP8: those whose sizes suit FP8 GEMMs."""
    return tuple(
        joint.name
        for joint in joints
        if all(size > 0 and size % ALIGNMENT == 0 for part in joint.tensors() for size in part.shape)
    )
