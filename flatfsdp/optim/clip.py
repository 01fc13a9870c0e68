"""Between reduction and optimizer: the norm of gradients that are sharded.

In:   gradients, by the ranks over which they are sharded.
Out:  their norm over all ranks, and what to multiply them by; `fused.py` does that where it reads them.
Next: any torch.optim optimizer over the same shards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

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

    As `torch.nn.utils.clip_grad_norm_`.  Padding is zero in every gradient and adds nothing.

    Args:
        masters: of one model; shards over different groups of the grid's ranks are summed group by group.
        grid: all ranks of the model.

    Returns:
        The norm before scaling, 0-dim, FP32 at least, where the model computes; zero without gradients.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        ValueError: if a shard belongs to other ranks than the model, so that no rank knows the whole norm.
    """
    require_same_grid([grid, *(master.grid for master in masters)])
    if not masters:
        return torch.zeros(())
    by_ranks: dict[Ranks, list[Tensor]] = {}
    for master in masters:
        by_ranks.setdefault(master.grid.shard, []).extend(master.grads)
    norm = grad_norm(by_ranks, masters[0].device, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm is {norm.item()}; look for NaN or overflow in the last backward"
        )
    scale_grads([grad for grads in by_ranks.values() for grad in grads], clip_coefficient(norm, max_norm))
    return norm


def require_same_grid(grids: Iterable[Grid]) -> None:
    """
    Raises:
        ValueError: if some are of fewer ranks than others, which then have gradients of their own (experts).
    """
    sizes = sorted({grid.num_ranks for grid in grids})
    if len(sizes) > 1:
        raise ValueError(
            f"a unit is spread over {sizes[0]} ranks and the model over {sizes[-1]}, "
            "so no rank knows the norm of all gradients; clip such units by themselves"
        )


def grad_norm(grads: Mapping[Ranks, list[Tensor]], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """(sum over all gradients |.|^p)^(1/p), or the largest magnitude for an infinite p.  Collective.

    Args:
        grads: by the ranks over which they are sharded; all ranks pass the same keys in the same order, also
            those that have no gradient for one.
        device: where to communicate.

    Returns:
        0-dim, FP32 at least, on `device`.
    """
    norms = [_norm_over(ranks, of_ranks, device, norm_type) for ranks, of_ranks in grads.items()]
    if not norms:
        return torch.zeros((), device=device)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by: 0-dim, at most 1, NaN if the norm is."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_grads(grads: list[Tensor], coefficient: Tensor) -> None:
    """In place; all on one device."""
    if grads:
        torch._foreach_mul_(grads, coefficient.to(grads[0].device))


def _norm_over(ranks: Ranks, grads: list[Tensor], device: torch.device, norm_type: float) -> Tensor:
    # In FP32 at least: 16 bits overflow, or lose digits, in the powers.
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    norms = torch._foreach_norm(grads, norm_type, dtype=dtype) if grads else [torch.zeros((), dtype=dtype)]
    norm = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if ranks.size == 1:
        return norm
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=ranks.group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=ranks.group)
    return powers ** (1.0 / norm_type)
