"""`AdamW`: one kernel updates all parameters and writes what the next forward needs of them.

Next: `flatfsdp.kernels.optim.adamw` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.kernels.optim.adamw import Corrected, Numbers, adamw, bias_corrected
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.optim.clip import NonFinite
from flatfsdp.optim.fused import Formula, FusedOptimizer, LaunchKey, wide_of
from flatfsdp.optim.joined import STEP, Due, step_count

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_DTYPES = (torch.float32, torch.bfloat16)
LARGEST_BF16_BETA = 0.99
"""Largest beta for bf16 moments.  The last of bf16's 8 bits is worth 2^-7 to 2^-8 of a value: decay by less
than half of that rounds to no decay."""


class AdamW(FusedOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Options and state are those of `torch.optim.AdamW`: each loads the other's state dict, and learning-rate
    schedulers work.  `state["step"]` is on the parameter's device, as with `fused=True` there.  A parameter
    is rounded once a step.  The step also writes the shard that is gathered next, so a later write through
    `.data` has no effect until the following step: write to the parameter itself, under `torch.no_grad()`.

        no_decay = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
        optimizer = flatfsdp.optim.AdamW(flatfsdp.param_groups(model, [no_decay]), lr=3e-4, max_grad_norm=1.0)

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these; groups may have their own `lr`, `betas`, `eps` and `weight_decay`.
        max_grad_norm: clip gradients to this norm over all ranks, while they are read; None: do not clip.
            With FP32 gradients the bits are those of `model.clip_grad_norm_` and a step; with several
            parameter groups the norm may be rounded differently.
        nonfinite: what a step does if the norm of the gradients is NaN or infinite, on any rank.  "raise" and
            "skip" leave parameters, moments, step counts and FP8 scales as if the step had not been.  The
            device decides, so no step waits for it: "raise" raises in the next step (on a CPU at once), or in
            `state_dict()`; "skip" counts in `skipped_steps`.  Both read all gradients for their norm and,
            like `max_grad_norm`, make `step` collective, so one optimizer must have all parameters of the
            model.  "step" updates regardless.
        pp_group: ranks with the other stages of a pipeline, whose gradients count in the norm, too; default:
            the group of the model's `FlatStage`.
        moment_dtype: dtype of `exp_avg` and `exp_avg_sq`: FP32, bf16, or None for the parameter's.  In bf16
            they take 4 bytes less an element, and betas may be at most 0.99: with 0.999, rounding would
            restore `exp_avg_sq` in every step, so that it never decays.

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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        pp_group: dist.ProcessGroup | None = None,
        moment_dtype: torch.dtype | None = None,
        nonfinite: NonFinite = "raise",
    ) -> None:
        if moment_dtype is not None and moment_dtype not in MOMENT_DTYPES:
            raise ValueError(f"moment_dtype is {moment_dtype!r}, not torch.float32, torch.bfloat16 or None")
        self.moment_dtype = moment_dtype
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, max_grad_norm, pp_group, nonfinite)

    def _check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]!r}; it must be 0 or positive")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas are {group['betas']!r}; they must be two numbers in [0, 1)")
        if self.moment_dtype == torch.bfloat16 and max(group["betas"]) > LARGEST_BF16_BETA:
            raise ValueError(
                f"betas are {group['betas']!r}, and bf16 moments cannot change so slowly; use betas of at "
                f"most {LARGEST_BF16_BETA}, such as (0.9, 0.95), or FP32 moments"
            )
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ValueError(f"a parameter group has {name}={group[name]!r}; AdamW does not support it")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moment_dtype": self.moment_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores state, also in `load_state_dict`, which has cast moments to the parameter's dtype."""
        super().__setstate__(state)
        for parameter, of_parameter in self.state.items():
            if not of_parameter:
                continue
            # Most other optimizers count on the host.
            of_parameter[STEP] = step_count(of_parameter[STEP], parameter)
            if self.moment_dtype is not None:
                for name in MOMENTS:
                    of_parameter[name] = of_parameter[name].to(self.moment_dtype)

    def _counts(self, group: dict[str, Any]) -> bool:
        return True

    def _formula(self, due: Due) -> Formula:
        state, group = due.updated.state(self.state), due.updated.group
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(due.updated.parameter, dtype=self.moment_dtype)
        beta1, beta2 = map(float, group["betas"])
        numbers = Numbers.of(float(group["lr"]), (beta1, beta2), group["weight_decay"])
        return Formula([state[name] for name in MOMENTS], numbers)

    def _on_device(self, counted: Sequence[tuple[Due, Tensor]]) -> Sequence[Tensor]:
        # One launch for all counts of a kind, instead of several for each.
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Corrected]]] = {}
        for index, (due, step) in enumerate(counted):
            group, parameter = due.updated.group, due.updated.parameter
            options = Corrected(float(group["lr"]), float(group["eps"]), *map(float, group["betas"]))
            by_kind.setdefault((parameter.device, parameter.dtype), []).append((index, step, options))
        found: dict[int, Tensor] = {}
        for (_, dtype), of_kind in by_kind.items():
            indices, steps, of_steps = zip(*of_kind, strict=True)
            found.update(zip(indices, bias_corrected(steps, of_steps, wide_of(dtype)), strict=True))
        return [found[index] for index in range(len(counted))]

    def _update(
        self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None, taken: Tensor | None
    ) -> None:
        adamw(runs, grad_scale=grad_scale, taken=taken, dtype=kind.rounding)
