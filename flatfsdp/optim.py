"""Between reduction and optimizer: the norm of gradients that are sharded.

In:   flat shards with `.grad`.
Next: any torch.optim optimizer over the same shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm import Ranks


def clip_grad_norm(
    shards: Sequence[Tensor],
    ranks: Ranks,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of all shards by min(1, max_norm / (norm + 1e-6)), norm taken over all ranks.

    As `torch.nn.utils.clip_grad_norm_`, with (sum over ranks of |local norm|^p)^(1/p), or the maximum for
    an infinite p.  Padding is zero in every gradient and adds nothing.

    Returns:
        The norm before scaling, 0-dim; zero if there are no gradients.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
    """
    grads = [shard.grad for shard in shards if shard.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    if ranks.size > 1:
        norm = norm.to(shards[0].device)
        if math.isinf(norm_type):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=ranks.group)
        else:
            powers = norm**norm_type
            dist.all_reduce(powers, group=ranks.group)
            norm = powers ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm is {norm.item()}; look for NaN or overflow in the last backward"
        )
    if grads:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
