"""Packed operands of several projections' weights, and which of them an engine may store in FP8.

In:   projections of transformers, possibly inside LoRA.
Out:  packs for the engine, and the operands that it made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.operand import FP8_OPERAND
from flatfsdp.contract.packed import Pack, packed_tensor
from flatfsdp.kernels.gemm.gemm import ALIGNMENT


def packs_of(name: str, bases: Sequence[Any]) -> tuple[Pack, ...]:
    """The packs of their weights, stacked by rows, and of their biases if they have any."""
    kinds = ("weight",) if bases[0].bias is None else ("weight", "bias")
    return tuple(Pack(f"{name}_{kind}", tuple((each, kind) for each in bases)) for kind in kinds)


def operands_of(layer: nn.Module, packs: Sequence[Pack]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and bias of one GEMM; None if the weights are not contiguous.

    Args:
        layer: the owner of the packs.
        packs: the result of `packs_of`.
    """
    weight = packed_tensor(layer, packs[0])
    if weight is None:
        return None
    if len(packs) == 1:
        return weight, None
    bias = packed_tensor(layer, packs[1])
    return weight, torch.cat(packs[1].tensors()) if bias is None else bias


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


def stored_in_fp8(packs: Iterable[Pack]) -> tuple[str, ...]:
    """Names of weights that an engine may store in FP8: those whose sizes suit FP8 GEMMs."""
    return tuple(
        pack.name
        for pack in packs
        if all(size > 0 and size % ALIGNMENT == 0 for part in pack.tensors() for size in part.shape)
    )
