r"""`Verdict`: whether a step is taken, decided on the device and equal on all ranks.

In:   the gradients of each rank.
Out:  a `Verdict`: one number on the device, which kernels read, and later the same on the host (`Awaited`).
Next: `fused.py` passes it to its kernels, and raises by it.

    norm over all ranks --finite?--> taken, 1 or 0 --> kernels: new values, or the old ones
                        \--pinned CPU memory, event--> the next step waits for it, and may raise

A non-finite norm shows on all ranks.  If no rank knows the norm of the whole model, because units are spread
over fewer ranks than others (experts) or ranks share an ordinary layer, each rank looks at its own gradients,
and the worst value of all ranks counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.ranks import Ranks
from flatfsdp.optim.clip import (
    Gradients,
    identity_of_norm,
    local_norm,
    norm_over,
    norm_over_ranks,
    unless_finite,
    widest,
)

NonFinite = Literal["raise", "skip", "step"]
"""What a step does if gradients are not finite: raise, skip itself, or step regardless."""


class NonFiniteGradientError(RuntimeError):
    """Gradients of a step were not finite on some rank, and nothing was changed on any."""


class Verdict(NamedTuple):
    """Decision on a step.

    Attributes:
        worst: finite if the step is taken: the norm of all gradients, or the worst value of all ranks.
        is_norm: whether it is the norm of all gradients.
        taken: FP32, 0-dim, on the device of `worst`: 1 to take the step, 0 to leave it out.
    """

    worst: Tensor
    is_norm: bool
    taken: Tensor

    @staticmethod
    def by(worst: Tensor, *, is_norm: bool) -> Verdict:
        """Makes the verdict from a non-negative number; NaN or infinity leaves the step out."""
        taken = torch.empty((), dtype=torch.float32, device=worst.device)
        # NaN is not less than infinity either.  With `out`, the comparison writes FP32 in the same launch.
        torch.lt(worst, math.inf, out=taken)
        return Verdict(worst, is_norm, taken)


def judge(
    gradients: Gradients,
    device: torch.device,
    *,
    alone: Sequence[Tensor],
    tensor_parallel: Sequence[Ranks],
    stages: Ranks,
    needs_norm: bool,
) -> Verdict:
    """Decides on a step, with the same bits on all ranks.  Collective.

    Args:
        gradients: shards with their gradients; all ranks of a shard pass it, even without a gradient.
        device: device to communicate on.
        alone: gradients of ordinary parameters.
        tensor_parallel: ranks that share the layers of these, in the same order on all of them.
        stages: ranks with other stages of the model.
        needs_norm: whether the number has to be the norm of all gradients.

    Raises:
        ValueError: if the norm is needed and no rank knows it.
    """
    # In the order of the shards, which is equal on all ranks; that of a set is not.
    grids = dict.fromkeys(shard.grid for shard, _ in gradients)
    if needs_norm or not (tensor_parallel or len({grid.num_ranks for grid in grids}) > 1):
        replicas = {grid.replicate for grid in grids if grid.replicate.size > 1}
        norm = norm_over_ranks(
            gradients,
            device,
            alone=alone,
            # By name, which all ranks of a group have in common.
            replicas=sorted(replicas, key=lambda ranks: ranks.name),
            stages=stages,
        )
        return Verdict.by(norm, is_norm=True)
    grads = [*alone, *(grad for _, of_shard in gradients for grad in of_shard)]
    identity = identity_of_norm(shard for shard, _ in gradients)
    # The grid with most ranks includes those of all others.
    largest = max(grids, key=lambda grid: (grid.num_ranks, grid.tensor.size), default=None)
    together = [*tensor_parallel, *(() if largest is None else largest.dimensions)]
    worst = norm_over(together, local_norm(grads, widest(grads), device, 2.0), math.inf, identity)
    if stages.size > 1:
        # Other stages may join this as a part of their norm.
        identity = Identity(Action.NORM) if identity is None else identity
        worst = norm_over((stages,), unless_finite(worst).double(), math.inf, identity)
    return Verdict.by(worst, is_norm=False)


class Awaited(NamedTuple):
    """A verdict on its way to the host.

    Attributes:
        worst: `worst` of the verdict, in CPU memory.
        arrived: event after its arrival; None if it has arrived.
    """

    worst: Tensor
    is_norm: bool
    arrived: torch.cuda.Event | None

    @staticmethod
    def of(verdict: Verdict) -> Awaited:
        """Sends a verdict to the host, without waiting for the device."""
        worst = verdict.worst
        if worst.device.type != "cuda":
            return Awaited(worst, verdict.is_norm, None)
        # Pinned, because a copy to other memory would make the host wait.
        host = torch.empty((), dtype=worst.dtype, device="cpu", pin_memory=True)
        host.copy_(worst, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(worst.device))
        return Awaited(host, verdict.is_norm, arrived)

    def check(self) -> None:
        """Waits for the verdict.

        Raises:
            NonFiniteGradientError: if the step was left out.
        """
        if self.arrived is not None:
            # Waits for the copy only, not for work that was launched after it.
            self.arrived.synchronize()
        worst = float(self.worst)
        if not math.isfinite(worst):
            what = f"the gradient norm was {worst}" if self.is_norm else "gradients were not finite"
            raise NonFiniteGradientError(
                f"{what} in the last optimizer step, so that it changed nothing on any rank: its parameters, "
                "moments, step counts and FP8 scales are as before that step; look for NaN or overflow in "
                'its backward, or leave out such steps with nonfinite="skip"'
            )
