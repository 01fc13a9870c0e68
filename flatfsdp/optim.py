"""Between reduction and optimizer: the norm of gradients that are sharded.

In:   master shards with their gradients.
Next: any torch.optim optimizer over the same shards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm import Grid, Ranks
from flatfsdp.master import MasterShard


def clip_grad_norm(
    masters: Sequence[MasterShard],
    grid: Grid,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of all shards by min(1, max_norm / (norm + 1e-6)), norm taken over all ranks.

    As `torch.nn.utils.clip_grad_norm_`, with (sum over shards of |norm of the shard|^p)^(1/p), or the maximum
    for an infinite p.  Padding is zero in every gradient and adds nothing.

    Args:
        masters: of one model; shards over different groups of the grid's ranks are summed group by group.
        grid: all ranks of the model.

    Returns:
        The norm before scaling, 0-dim, FP32 at least, where the model computes; zero without gradients.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        ValueError: if a shard belongs to other ranks than the model, so that no rank knows the whole norm.
    """
    by_ranks: dict[Ranks, list[Tensor]] = {}
    for master in masters:
        if master.grid.num_ranks != grid.num_ranks:
            raise ValueError(
                f"a unit is spread over {master.grid.num_ranks} ranks and the model over {grid.num_ranks}, "
                "so no rank knows the norm of all gradients; clip such units by themselves"
            )
        by_ranks.setdefault(master.grid.shard, []).extend(master.grads)
    norms = [_norm_over(ranks, grads, masters[0].device, norm_type) for ranks, grads in by_ranks.items()]
    if not norms:
        return torch.zeros(())
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm is {norm.item()}; look for NaN or overflow in the last backward"
        )
    grads = [grad for found in by_ranks.values() for grad in found]
    if grads:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(grads[0].device))
    return norm


def _norm_over(ranks: Ranks, grads: list[Tensor], device: torch.device, norm_type: float) -> Tensor:
    # In FP32 at least: 16 bits overflow, or lose digits, in the powers.
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms = torch._foreach_norm(grads, norm_type, dtype=dtype) if grads else [torch.zeros((), dtype=dtype)]
    norm = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type).to(device)
    if ranks.size == 1:
        return norm
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=ranks.group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=ranks.group)
    return powers ** (1.0 / norm_type)
