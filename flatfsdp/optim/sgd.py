"""SGD as one kernel for all parameters, and for all that the next forward needs of them.

Next: `flatfsdp.kernels.optim.sgd` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.kernels.optim.runs import Run
from flatfsdp.kernels.optim.sgd import Numbers, sgd
from flatfsdp.optim.fused import Due, FusedOptimizer, LaunchKey

BUFFER = "momentum_buffer"


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with momentum or without.

    Options and state are those of `torch.optim.SGD`: each loads the other's state dict, and learning rate
    schedulers work.  Writes through `.data` as in `AdamW`.

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these; groups may have options of their own.
        max_grad_norm: clips gradients to this norm over all ranks, while they are read: with FP32 gradients
            the same bits as `clip_grad_norm_` and then a step.  `step` is collective then.
        pp_group: ranks that have the other stages of a pipeline, whose gradients count in that norm, too;
            default: as `FlatStage` has said.

    Attributes:
        grad_norm: of the last step, before clipping: 0-dim, on the device; None without `max_grad_norm`.

    Raises:
        ValueError: if an option is out of its range; for parameters that are not floating-point.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_grad_norm: float | None = None,
        pp_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, max_grad_norm, pp_group)

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]!r}; it must be 0 or positive")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov is set with momentum={group['momentum']!r} and dampening={group['dampening']!r}; "
                "it needs a momentum and no dampening"
            )
        if group.get("maximize"):
            raise ValueError("a parameter group has maximize=True, which this SGD has not")

    def _advance(self, due: Due) -> tuple[list[Tensor], Sequence[float], bool]:
        group = due.group
        lr, momentum = float(group["lr"]), group["momentum"]
        if momentum == 0:
            return [], Numbers(lr, group["weight_decay"]), False
        state = self.state[due.parameter]
        is_first = state.get(BUFFER) is None
        if is_first:
            state[BUFFER] = torch.empty_like(due.parameter)
        numbers = Numbers(lr, group["weight_decay"], momentum, 1 - group["dampening"], float(is_first))
        return [state[BUFFER]], numbers, group["nesterov"]

    def _update(self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None) -> None:
        sgd(runs, grad_scale=grad_scale, nesterov=kind.variant, dtype=kind.rounding)
