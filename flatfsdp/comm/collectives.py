"""Collectives on tensors; hides the differences between gloo and NCCL, and torch 2.11 and 2.13.

Next: `engine/storage/group.py` gathers and `engine/step/reduce.py` reduces with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.ranks import Ranks

# torch 2.13 renamed these and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def uses_nccl(ranks: Ranks, device: torch.device) -> bool:
    """Whether collectives over these ranks on tensors of `device` run on NCCL."""
    if ranks.group is None or device.type != "cuda":
        return False
    return bool(ranks.group._get_backend(device).name() == "nccl")


def one_launch(ranks: Ranks, device: torch.device, collectives: int) -> AbstractContextManager[None]:
    """Context in which collectives of one kind become one launch with NCCL; gloo runs them one by one."""
    if collectives < 2 or not uses_nccl(ranks, device):
        return nullcontext()
    return dist._coalescing_manager(ranks.group)


def all_gather(full: Tensor, shard: Tensor, ranks: Ranks) -> None:
    """Gathers full[r * len(shard) : (r + 1) * len(shard)] = rank r's shard; both 1-D and of one dtype."""
    # As bytes: gloo does not support FP8, and one launch gathers several dtypes.
    _all_gather(full.view(torch.uint8), shard.view(torch.uint8), group=ranks.group)


def all_gather_numbers(everyones: Tensor, own: Tensor, ranks: Ranks) -> None:
    """Gathers one int64 from each rank; unlike `all_gather`, not as bytes."""
    _all_gather(everyones, own, group=ranks.group)


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that a collective may still be writing."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Makes the compute stream (with gloo, the host) wait for the tensor, and returns it."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def start_all_gather(part: Tensor, ranks: Ranks) -> Pending:
    """Starts gathering every rank's `part`, contiguous and of one shape, along dim 0, in rank order."""
    whole = part.new_empty(part.shape[0] * ranks.size, *part.shape[1:])
    if whole.numel() == 0:
        return Pending(whole, None)
    # As bytes: gloo does not support FP8.
    work = _all_gather(whole.view(torch.uint8), part.view(torch.uint8), group=ranks.group, async_op=True)
    return Pending(whole, work)


def start_reduce_scatter(addend: Tensor, ranks: Ranks) -> Pending:
    """Starts reducing contiguous `addend`s to this rank's part, along dim 0, of the sum over ranks."""
    part = addend.new_empty(addend.shape[0] // ranks.size, *addend.shape[1:])
    # Ranks have parts of one shape, so all of them leave it out.
    if part.numel() == 0:
        return Pending(part, None)
    return Pending(part, _reduce_scatter(part, addend, group=ranks.group, async_op=True))


def start_all_reduce(addend: Tensor, ranks: Ranks) -> Pending:
    """Starts summing `addend` over the ranks, in place."""
    if addend.numel() == 0:
        return Pending(addend, None)
    return Pending(addend, dist.all_reduce(addend, group=ranks.group, async_op=True))


def gather(full: Tensor | None, shard: Tensor, ranks: Ranks) -> None:
    """Gathers the shards on the first rank only; the others pass None for `full`."""
    parts = None if full is None else list(full.chunk(ranks.size))
    dist.gather(shard, parts, group=ranks.group, group_dst=0)


def scatter(shard: Tensor, full: Tensor | None, ranks: Ranks) -> None:
    """Scatters the first rank's `full`: `shard` becomes this rank's part.  The reverse of `gather`."""
    if ranks.size == 1:
        assert full is not None
        shard.copy_(full)
        return
    parts = None if full is None else list(full.chunk(ranks.size))
    dist.scatter(shard, parts, group=ranks.group, group_src=0)


def reduce_scatter(shard: Tensor, full: Tensor, ranks: Ranks, *, mean: bool) -> None:
    """Sets `shard` to this rank's part of the sum, or mean, of `full` over the ranks."""
    _reduce_scatter(shard, full, op=_operation(mean), group=ranks.group)


def exchange_rows(received: Tensor, sent: Sequence[Tensor], ranks: Ranks) -> None:
    """Sends every other rank one row, and receives one from each.

    Args:
        received: [ranks - 1, n], contiguous: row i becomes what the i-th of the other ranks has sent here.
        sent: what the i-th of the other ranks gets: [n], contiguous.
    """
    own = ranks.rank
    if uses_nccl(ranks, received.device):
        # It would copy what a rank sends to itself.
        nothing = received.new_empty(0)
        everyones = [*received[:own], nothing, *received[own:]]
        dist.all_to_all(everyones, [*sent[:own], nothing, *sent[own:]], group=ranks.group)
        return
    # All of one length, also what a rank sends to itself.
    others = torch.stack([*sent[:own], sent[0], *sent[own:]])
    rows = torch.empty_like(others)
    dist.all_to_all_single(rows.view(-1), others.view(-1), group=ranks.group)
    received[:own].copy_(rows[:own])
    received[own:].copy_(rows[own + 1 :])


def all_reduce(tensor: Tensor, ranks: Ranks, *, mean: bool) -> None:
    """Replaces `tensor` by its sum, or mean, over the ranks."""
    dist.all_reduce(tensor, op=_operation(mean), group=ranks.group)


def raise_to_largest(values: Tensor, ranks: Ranks) -> None:
    """Replaces integers, or amaxes (FP32, not negative), by the largest over the ranks; NaN wins."""
    # Amaxes as integers, because the order of the bits puts NaN above infinity on every backend.
    integers = values.view(torch.int32) if values.is_floating_point() else values
    dist.all_reduce(integers, op=dist.ReduceOp.MAX, group=ranks.group)


def _operation(mean: bool) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def broadcast(tensor: Tensor, ranks: Ranks) -> None:
    """Replaces `tensor` by that of the group's first rank."""
    if ranks.size > 1:
        dist.broadcast(tensor, group=ranks.group, group_src=0)
