"""`ShardedGradScaler` with fairscale's order of arguments, over PyTorch's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _ShardedGradScaler


class ShardedGradScaler(_ShardedGradScaler):
    """Scales the loss, and judges overflow in the gradient shards of all ranks together.

    Looks at `.grad`: gradients that are in `main_grad` need no scaling.

    Args:
        process_group: ranks that hold shards; default: all.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            "cuda" if torch.cuda.is_available() else "cpu",
            init_scale,
            backoff_factor,
            growth_factor,
            growth_interval,
            enabled,
            process_group,
        )
