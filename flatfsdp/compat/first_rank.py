"""Copies the first rank's values to all ranks, as DistributedDataParallel does.

In:   a model that ranks may have initialised differently.
Out:  the first rank's parameters and buffers on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.ranks import Ranks, default_group


@torch.no_grad()
def take_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Copies the first rank's parameters and buffers to all ranks, one at a time.  Collective.

    Args:
        model: not sharded; in host memory or on the device.  Tensors on the meta device are skipped.
        device: device of the communication.

    Raises:
        RuntimeError: if names, shapes, dtypes or `requires_grad` differ between ranks; on all ranks.
    """
    world = Ranks.of(default_group())
    if world.size == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name} {_described(tensor)}" for name, tensor in named]
    check_same_on_all_ranks(lines, [world], device)
    for _, tensor in named:
        if not tensor.is_meta:
            moved = tensor.detach().to(device).contiguous()
            dist.broadcast(moved, group=world.group, group_src=0)
            if moved.data_ptr() != tensor.data_ptr():
                tensor.copy_(moved)


def _described(tensor: Tensor) -> str:
    place = "on the meta device" if tensor.is_meta else "with values"
    return f"{tuple(tensor.shape)} {tensor.dtype} {place}, requires_grad={tensor.requires_grad}"
