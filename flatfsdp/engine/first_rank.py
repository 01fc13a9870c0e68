"""Copies the first rank's values to all ranks, as DistributedDataParallel does (`sync_module_states`).

In:   parameters and buffers of a unit, whole, which ranks may have initialised differently.
Out:  the first data-parallel rank's values on all of them.
Next: `build.py` shards them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.collectives import broadcast
from flatfsdp.comm.grid import Grid


@torch.no_grad()
def take_from_first_rank(tensors: Mapping[str, Tensor], grid: Grid, device: torch.device) -> None:
    """Copies the first rank's tensors to all data-parallel ranks, one at a time.  Collective.

    Args:
        tensors: in CPU memory or on the device, by name.
        device: device of the communication.

    Raises:
        RuntimeError: if names, shapes or dtypes differ between ranks; on all ranks.
    """
    # Among the ranks of a replica first, and then from the first replica to the others.
    dimensions = [ranks for ranks in (grid.shard, grid.replicate) if ranks.size > 1]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    check_same_on_all_ranks(lines, dimensions, device)
    if device.type == "meta":
        return
    for tensor in filter(torch.numel, tensors.values()) if dimensions else ():
        moved = tensor.detach().to(device).contiguous()
        for ranks in dimensions:
            # As bytes: gloo does not support all dtypes of buffers.
            broadcast(moved.view(-1).view(torch.uint8), ranks)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)
