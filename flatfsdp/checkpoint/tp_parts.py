"""Joins tensor-parallel parts to whole tensors, and cuts them: full checkpoints have whole tensors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.collectives import all_gather, gather, scatter
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.flat.layout import ParamSlot


def joined(
    part: Tensor, slot: ParamSlot, grid: Grid, device: torch.device, *, rank0_only: bool
) -> Tensor | None:
    """Joins a whole tensor, on the device of `part`.  Collective over tensor-parallel ranks if split.

    Args:
        part: this rank's part, of the slot's shape.
        slot: slot of the parameter.
        grid: ranks of the unit.
        device: device to communicate on.
        rank0_only: give the result to the first tensor-parallel rank only; None on the others.
    """
    ranks = grid.tensor
    if slot.partition is None or ranks.size == 1:
        return None if rank0_only and ranks.rank != 0 else part
    own = part.to(device).reshape(-1).contiguous()
    everyones = None if rank0_only and ranks.rank != 0 else own.new_empty(ranks.size * own.numel())
    if rank0_only:
        gather(everyones, own, ranks)
    else:
        assert everyones is not None
        all_gather(everyones, own, ranks)
    if everyones is None:
        return None
    return slot.partition.join(everyones.view(ranks.size, *slot.shape).unbind()).to(part.device)


def own_part(value: Any, slot: ParamSlot, ranks: Ranks) -> Any:
    """This rank's part, a copy or a view, of a whole tensor; what is none is left as it is."""
    if slot.partition is None or ranks.size == 1:
        return value
    if not isinstance(value, Tensor) or tuple(value.shape) != slot.whole_shape:
        return value
    return part_of(value, slot.partition.dim, slot.partition.sizes, ranks)


def parts(value: Tensor, slot: ParamSlot, ranks: Ranks) -> list[Tensor]:
    """Every rank's part of a whole tensor."""
    return [own_part(value, slot, Ranks(ranks.group, ranks.size, rank)) for rank in range(ranks.size)]


def scattered_part(value: Tensor | None, slot: ParamSlot, grid: Grid, like: Tensor) -> Tensor:
    """Scatters the first tensor-parallel rank's whole tensor; returns this rank's part.

    Collective over the tensor-parallel ranks.

    Args:
        value: the whole tensor on the first rank; None on the others.
        slot: slot of the parameter.
        grid: ranks of the unit.
        like: tensor of the part's shape, on the device to communicate on.
    """
    own = torch.empty_like(like).view(-1)
    full = None
    if value is not None:
        full = torch.cat([part.to(own).reshape(-1) for part in parts(value, slot, grid.tensor)])
    scatter(own, full, grid.tensor)
    return own.view(like.shape)
