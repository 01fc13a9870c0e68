"""Between reduction and optimizer: the norm of gradients that are sharded, split, and in several stages.

In:   gradients, by the ranks over which they are spread.
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

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_gather
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.flat_shard import FlatShard
from flatfsdp.engine.storage.master import MasterShard


def clip_grad_norm(
    masters: Sequence[MasterShard],
    grids: Iterable[Grid],
    device: torch.device,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: Ranks = ALONE,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of all shards by min(1, max_norm / (norm + 1e-6)), norm taken over all ranks.

    As `torch.nn.utils.clip_grad_norm_`.  Padding is zero in every gradient and adds nothing.  What all ranks
    of a tensor-parallel group have counts once.

    Args:
        masters: of one model; shards over different groups of ranks are summed group by group.
        grids: of all FlatFSDP modules of the model.
        device: where the model computes.
        stages: ranks that have other parts of the model; they have to call this, too.

    Returns:
        The norm before scaling, 0-dim, FP32 at least, on `device`, with the same bits on all ranks; zero
        without gradients.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        ValueError: if max_norm is negative or norm_type not positive; if a module is spread over fewer ranks
            than others, so that no rank knows the whole norm.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ValueError(f"max_norm is {max_norm!r} and norm_type {norm_type!r}; >= 0 and > 0 make sense")
    require_same_grid(grids)
    counted: dict[Spread, list[Tensor]] = {}
    for master in masters:
        counted.setdefault(spread(master.grid), []).extend(master.grads if master.is_counted else ())
    dtype = widest(grad for master in masters for grad in master.grads)
    norm = grad_norm(counted, dtype, device, norm_type, stages, identity_of_norm(masters))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm is {norm.item()}; look for NaN or overflow in the last backward"
        )
    scale_grads([grad for master in masters for grad in master.grads], clip_coefficient(norm, max_norm))
    return norm


Spread = tuple[Ranks, ...]
"""Groups of ranks, each of which has another part of some gradients: of a grid of ranks, its dimensions."""


def spread(grid: Grid) -> Spread:
    """Over which ranks gradients are spread that are sharded, and may be split, on this grid."""
    return grid.shard, grid.tensor


def pipeline_of(given: dist.ProcessGroup | None, found: Iterable[Ranks]) -> Ranks:
    """Ranks that have other stages: `given`, or those that a shard says."""
    if given is not None:
        return Ranks.of(given)
    return next((ranks for ranks in found if ranks.size > 1), ALONE)


def identity_of_norm(shards: Iterable[MasterShard | FlatShard]) -> Identity | None:
    """What the collectives of a norm carry; None if those of these shards carry nothing."""
    first = next((found for shard in shards if (found := shard.identify(Action.NORM))), None)
    return None if first is None else Identity(Action.NORM, first.model)


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


def widest(grads: Iterable[Tensor]) -> torch.dtype:
    """The dtype to take a norm in: FP32 at least, because 16 bits overflow, or lose digits, in the powers."""
    return functools.reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)


def grad_norm(
    grads: Mapping[Spread, list[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    norm_type: float = 2.0,
    stages: Ranks = ALONE,
    identity: Identity | None = None,
) -> Tensor:
    """(sum over all gradients |.|^p)^(1/p), or the largest magnitude for an infinite p.  Collective.

    Args:
        grads: by the ranks over which they are spread; all these ranks pass the same keys in the same order,
            also those that have no gradient for one.
        dtype: of the norm, the same on all these ranks: `widest` of all gradients, counted here or not.
        device: where to communicate.
        stages: ranks with further gradients, by other keys.
        identity: what the collectives carry.

    Returns:
        0-dim, on `device`.
    """
    norms = [
        _norm_over(ranks, _local_norm(of_ranks, dtype, device, norm_type), norm_type, identity)
        for ranks, of_ranks in grads.items()
    ]
    norm = norms[0] if len(norms) == 1 else _norm_of(norms, dtype, device, norm_type)
    if stages.size == 1:
        return norm
    # Stages may have other dtypes, and other settings.
    identity = Identity(Action.NORM) if identity is None else identity
    return _norm_over((stages,), norm.double(), norm_type, identity).to(dtype)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by: 0-dim, at most 1, NaN if the norm is."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_grads(grads: list[Tensor], coefficient: Tensor) -> None:
    """In place; all on one device."""
    if grads:
        torch._foreach_mul_(grads, coefficient.to(grads[0].device))


def _local_norm(grads: list[Tensor], dtype: torch.dtype, device: torch.device, norm_type: float) -> Tensor:
    norms = torch._foreach_norm(grads, norm_type, dtype=dtype) if grads else []
    return _norm_of(norms, dtype, device, norm_type)


def _norm_of(norms: Sequence[Tensor], dtype: torch.dtype, device: torch.device, norm_type: float) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)


def _norm_over(spread: Spread, norm: Tensor, norm_type: float, identity: Identity | None) -> Tensor:
    """Of what all these ranks together have, from each one's norm."""
    several = [ranks for ranks in spread if ranks.size > 1]
    if not several:
        return norm
    powers = norm if math.isinf(norm_type) else norm**norm_type
    for ranks in several:
        # Gathered, so that all ranks, of whatever groups, add in the same order: their norms have the same
        # bits, and what several of them have stays equal.
        everyones = powers.new_empty(ranks.size)
        with launch(ranks, identity, powers.device):
            all_gather(everyones, powers.reshape(1), ranks)
        powers = everyones.amax() if math.isinf(norm_type) else everyones.sum()
    return powers if math.isinf(norm_type) else powers ** (1.0 / norm_type)
