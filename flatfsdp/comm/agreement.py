"""Checks that all ranks build the same thing, otherwise all of them raise; or makes them have the same.

In:   a description of what a rank is about to build, one line a part.
Out:  RuntimeError on every rank, with the first line that differs.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.checking.identity import DEFAULT_TIMEOUT, Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import broadcast
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks, several


def check_same_on_all_ranks(
    lines: Sequence[str],
    dimensions: Sequence[Ranks],
    device: torch.device,
    timeout: float | None = DEFAULT_TIMEOUT,
) -> int:
    """Raises RuntimeError on every rank, naming the first difference, unless all ranks pass equal `lines`.

    Also raises if ranks do not come.  If all agree, it costs one all-reduce of three integers a dimension.

    Args:
        lines: description of what this rank builds, one line a part.
        dimensions: dimensions of a grid of ranks; all ranks of the grid raise, or none.
        device: device to communicate on.
        timeout: seconds to wait for other ranks; None: as long as the process group allows.

    Returns:
        A random number of 31 bits that all ranks of the grid have in common.
    """
    dimensions = several(dimensions)
    chance = secrets.randbits(31)
    if not dimensions or device.type == "meta":
        return chance
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    # The largest digest and the largest negated one tell, in one all-reduce, whether all are equal.  Any
    # rank's random number will do; the largest is known to all.
    extremes = torch.tensor([digest, -digest, chance], dtype=torch.int64, device=device)
    build = Identity(Action.BUILD, ModelIdentity(communicators=dimensions, timeout=timeout))
    # Each dimension after the other, so that a number reaches the whole grid: first along a line, then from
    # every rank of the line.
    for ranks in dimensions:
        with launch(ranks, build, device):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=ranks.group)
    largest, negated_smallest, agreed = extremes.tolist()
    if largest == -negated_smallest:
        return agreed
    # Only now: the lines of a large model take long to exchange, and are needed for a message alone.
    everyone = {dist.get_rank(): list(lines)}
    for ranks in dimensions:
        for theirs in all_gather_object(everyone, ranks, device):
            everyone.update(theirs)
    first, *others = sorted(everyone)
    for rank in others:
        for expected, found in zip_longest(everyone[first], everyone[rank], fillvalue="nothing"):
            if expected != found:
                raise RuntimeError(
                    f"the model is not the same on all ranks: rank {first} has [{expected}] where rank "
                    f"{rank} has [{found}]; build it from the same configuration on every rank"
                )
    raise AssertionError("two digests differ, and no line does")


@torch.no_grad()
def make_same_on_all_ranks(
    tensors: Mapping[str, Tensor], dimensions: Sequence[Ranks], device: torch.device
) -> None:
    """Copies the first rank's tensors to all ranks, one at a time.  Collective.

    Args:
        tensors: in CPU memory or on the device, by name.
        dimensions: dimensions of a grid of ranks; each tensor goes over one after the other.
        device: device to communicate on.

    Raises:
        RuntimeError: if names, shapes or dtypes differ between ranks; on all ranks.
    """
    dimensions = several(dimensions)
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
