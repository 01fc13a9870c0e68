"""SGD as one kernel for all parameters, and for all that the next forward needs of them.

Next: `flatfsdp.kernels.optim.sgd` has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.kernels.optim.runs import Run
from flatfsdp.kernels.optim.sgd import Numbers, sgd
from flatfsdp.optim.fused import Due, Formula, FusedOptimizer, LaunchKey, step_count
from flatfsdp.optim.joined import STEP
from flatfsdp.optim.verdict import NonFinite

BUFFER = "momentum_buffer"


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with momentum or without.

    Options and state are those of `torch.optim.SGD`: each loads the other's state dict, and learning rate
    schedulers work.  Beside the momentum there is `state["step"]`, which tells a first step from later ones;
    a state without it has had its first.  (A state whose only steps were skipped is no first one to
    `torch.optim.SGD`, which matters with dampening.)  Writes through `.data` as in `AdamW`.

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these; groups may have options of their own.
        max_grad_norm: clips gradients to this norm over all ranks, while they are read: with FP32 gradients
            the same bits as `model.clip_grad_norm_` and then a step (of a model that is sharded in place and
            has several parameter groups, up to the rounding of the norm).
        nonfinite: what a step does if the norm of the gradients is NaN or infinite, as in `AdamW`.
        pp_group: ranks that have the other stages of a pipeline, whose gradients count in that norm, too;
            default: as `FlatStage` has said.

    Attributes:
        grad_norm: of the last step, before clipping: 0-dim, on the device.  None with `nonfinite="step"` and
            no `max_grad_norm`, and where no rank knows it (experts).
        skipped_steps: how many steps were left out, refused ones too: int64, 0-dim, on the device.

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
        nonfinite: NonFinite = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, max_grad_norm, pp_group, nonfinite)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also part of `load_state_dict`."""
        super().__setstate__(state)
        for parameter, of_parameter in self.state.items():
            if of_parameter.get(BUFFER) is not None:
                of_parameter[STEP] = step_count(of_parameter.get(STEP, 1), parameter)

    def _formula(self, due: Due) -> Formula:
        group = due.group
        lr, momentum = float(group["lr"]), group["momentum"]
        if momentum == 0:
            return Formula([], Numbers(lr, group["weight_decay"]))
        state = due.updated.state(self.state)
        if state.get(BUFFER) is None:
            state[BUFFER] = torch.zeros_like(due.parameter)
            state[STEP] = step_count(0, due.parameter)
        numbers = Numbers(lr, group["weight_decay"], momentum, 1 - group["dampening"])
        return Formula([state[BUFFER]], numbers, group["nesterov"])

    def _on_device(self, counted: Sequence[tuple[Due, Tensor]]) -> Mapping[Tensor, Tensor]:
        return {due.parameter: step for due, step in counted}

    def _update(
        self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None, taken: Tensor | None
    ) -> None:
        sgd(runs, grad_scale=grad_scale, taken=taken, nesterov=kind.variant, dtype=kind.rounding)
