"""`ShardedGradScaler` with fairscale's order of arguments, over PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _ShardedGradScaler


class ShardedGradScaler(_ShardedGradScaler):
    """Scales the loss, and detects overflow in the gradient shards of all ranks together.

    It reads `.grad`; gradients in `main_grad` need no scaling.

    Args:
        init_scale: first loss scale.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: number of steps without overflow before the scale grows.
        enabled: False makes it do nothing.
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
        device = "cuda" if torch.cuda.is_available() else "cpu"
        factors = (backoff_factor, growth_factor, growth_interval)
        super().__init__(device, init_scale, *factors, enabled, process_group)

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or an iterable of losses, by the scale; 16-bit ones in FP32.

        FP16 overflows at 65504, and the scale starts above that.
        """
        return super().scale(_widened(outputs) if self._enabled else outputs)


def _widened(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if not isinstance(outputs, Iterable):
        return outputs
    widened = map(_widened, outputs)
    return type(outputs)(widened) if isinstance(outputs, (list, tuple)) else widened
