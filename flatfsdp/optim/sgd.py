"""`SGD`: one kernel updates all parameters and writes what the next forward needs of them.

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
from flatfsdp.optim.clip import NonFinite
from flatfsdp.optim.fused import Formula, FusedOptimizer, LaunchKey
from flatfsdp.optim.joined import STEP, Due, step_count

BUFFER = "momentum_buffer"


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with or without momentum.

    Options and state are those of `torch.optim.SGD`: each loads the other's state dict, and learning-rate
    schedulers work.  Beside the momentum there is `state["step"]`, which tells the first step from later
    ones; a state without it has had its first.  (If all steps so far were skipped, `torch.optim.SGD` takes
    the loaded state for one after the first step, which matters with dampening.)  A write through `.data`
    after a step has no effect until the following step, as in `AdamW`.

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these; groups may have their own options.
        max_grad_norm: clip gradients to this norm over all ranks, while they are read; None: do not clip.
            With FP32 gradients the bits are those of `model.clip_grad_norm_` and a step; with several
            parameter groups the norm may be rounded differently.
        nonfinite: what a step does if the norm of the gradients is NaN or infinite: "raise", "skip" or
            "step", as in `AdamW`.
        pp_group: ranks with the other stages of a pipeline, whose gradients count in the norm, too; default:
            the group of the model's `FlatStage`.

    Attributes:
        grad_norm: norm of the last step's gradients before clipping, 0-dim, on the device.  None with
            `nonfinite="step"` and no `max_grad_norm`, and if no rank knows it (experts).
        skipped_steps: number of steps left out, refused ones included: int64, 0-dim, on the device.

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
                f"nesterov needs momentum and no dampening, not {group['momentum']!r}, {group['dampening']!r}"
            )
        if group.get("maximize"):
            raise ValueError("a parameter group has maximize=True, which this SGD does not support")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores state; also part of `load_state_dict`."""
        super().__setstate__(state)
        for parameter, of_parameter in self.state.items():
            if of_parameter.get(BUFFER) is not None:
                # A momentum without a count is PyTorch's, and has had its first step: dampening applies.
                of_parameter[STEP] = step_count(of_parameter.get(STEP, 1), parameter)

    def _counts(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0)

    def _formula(self, due: Due) -> Formula:
        group = due.updated.group
        lr, momentum = float(group["lr"]), group["momentum"]
        if momentum == 0:
            return Formula([], Numbers(lr, group["weight_decay"]))
        state = due.updated.state(self.state)
        if state.get(BUFFER) is None:
            state[BUFFER] = torch.zeros_like(due.updated.parameter)
        numbers = Numbers(lr, group["weight_decay"], momentum, 1 - group["dampening"])
        return Formula([state[BUFFER]], numbers, group["nesterov"])

    def _on_device(self, counted: Sequence[tuple[Due, Tensor]]) -> Sequence[Tensor]:
        return [step for _, step in counted]

    def _update(
        self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None, taken: Tensor | None
    ) -> None:
        sgd(runs, grad_scale=grad_scale, taken=taken, nesterov=kind.variant, dtype=kind.rounding)
