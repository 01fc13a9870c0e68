r"""Norms of gradients that are sharded, split over tensor-parallel ranks, and in several stages; clipping.

In:   flat shards (`contract/flat_shard.py`) and their gradients.
Out:  the norm over all ranks, and the coefficient to multiply gradients by; a `Verdict`, whether a step is
      taken: one number on the device, which kernels read, and later the same on the host (`Awaited`).
Next: `FlatFSDP.clip_grad_norm_` and `parallel.clip_grad_norm_` multiply here; `fused.py` multiplies while it
      reads gradients, passes the verdict to its kernels, and raises by it.

    norm over all ranks --finite?--> taken, 1 or 0 --> kernels: new values, or the old ones
                        \--pinned CPU memory, event--> the next step waits for it, and may raise

A non-finite norm shows on all ranks.  If no rank knows the norm of the whole model, because units are spread
over fewer ranks than others (experts) or ranks share an ordinary layer, each rank looks at its own gradients,
and the worst value of all ranks counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_gather
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.flat_shard import Gradients
from flatfsdp.optim.piece_norms import PieceNorms, of_buffers


class Identified(Protocol):
    """Interface of a master shard, or of a local shard."""

    def identify(self, action: Action) -> Identity | None:
        """Identity that a collective for it carries."""


def clip_grad_norm(
    gradients: Gradients,
    device: torch.device,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: Ranks = ALONE,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients by min(1, max_norm / (norm + 1e-6)), with the norm taken over all ranks.  Collective.

    Does what `torch.nn.utils.clip_grad_norm_` does.  Padding is zero in every gradient and adds nothing.  A
    gradient that all ranks of a tensor-parallel group have counts once.

    Args:
        gradients: shards with their gradients; shards over different groups of ranks are summed group by
            group.
        device: device that the model computes on.
        max_norm: largest norm afterwards, not negative.
        norm_type: order of the norm, positive; `math.inf` for the largest magnitude.
        stages: ranks with other stages of the model; they must make the same call.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before scaling, 0-dim, FP32 at least, on `device`, with the same bits on all ranks; zero
        without gradients.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        ValueError: if max_norm is negative or norm_type not positive; if a shard is spread over fewer ranks
            than others, so that no rank knows the whole norm.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise ValueError(f"max_norm is {max_norm!r} and norm_type {norm_type!r}; >= 0 and > 0 make sense")
    norm = norm_over_ranks(gradients, device, norm_type, stages=stages)
    # Before gradients are scaled, which a NaN would overwrite.  The host waits for the device here, so only
    # if asked to.
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the gradient norm is {norm.item()}; look for NaN in the last backward")
    scale_grads(_all_of(gradients), clip_coefficient(norm, max_norm))
    return norm


def norm_over_ranks(
    gradients: Gradients,
    device: torch.device,
    norm_type: float = 2.0,
    *,
    alone: Sequence[Tensor] = (),
    replicas: Sequence[Ranks] = (),
    stages: Ranks = ALONE,
) -> Tensor:
    """Computes (sum over all gradients |.|^p)^(1/p), or the largest magnitude for infinite p.  Collective.

    With lanes it has the same bits on any number of ranks, however an optimizer groups the parameters.  A
    non-finite gradient shows on all ranks that share the norm, even if its rank does not count it because
    others have the same one.

    Args:
        gradients: shards with their gradients; all ranks of a shard pass it, even without a gradient.
        device: device to communicate on.
        norm_type: order of the norm.
        alone: gradients of ordinary parameters, which this rank has whole.
        replicas: ranks that have the same gradients; the largest of their norms counts, NaN above all.
        stages: ranks with other stages of the model.

    Returns:
        0-dim, on `device`, FP32 at least.

    Raises:
        ValueError: if a shard is spread over fewer ranks than others.
    """
    # Before the first collective: all ranks know these sizes, and raise together.
    require_same_grid(shard.grid for shard, _ in gradients)
    counted: dict[tuple[Ranks, ...], list[Tensor]] = {}
    uncounted: list[Tensor] = []
    for shard, grads in gradients:
        if shard.pieces is None:
            of_partners = counted.setdefault(shard.grid.partners, [])
            (of_partners if shard.is_counted else uncounted).extend(grad for _, grad in grads)
    dtype = widest([*alone, *_all_of(gradients)])
    identity = identity_of_norm(shard for shard, _ in gradients)
    # Norms that only this rank takes.
    own = [local_norm(grads, dtype, device, norm_type) for grads in (alone, uncounted) if grads]
    local = {each: local_norm(grads, dtype, device, norm_type) for each, grads in counted.items()}
    in_pieces = PieceNorms(of_buffers(gradients), dtype, device, norm_type)
    # Partners of one unit must also learn of non-finite gradients in units that they do not share.
    largest = in_pieces.largest
    others = [*own, *local.values(), *largest]
    bad = [unless_finite(norm) for norm in others] if len(others) > 1 else []
    norms = own[:1] if alone else []
    norms += [
        norm_over(partners, functools.reduce(torch.add, bad, norm), norm_type, identity)
        for partners, norm in local.items()
    ]
    if largest:
        pieces = torch.cat(in_pieces.over_ranks(identity, bad))
        norms.append(torch.linalg.vector_norm(pieces, norm_type))
    norm = norms[0] if len(norms) == 1 else _norm_of(norms, dtype, device, norm_type)
    # The largest over replicas, so that a NaN on one of them stops all.
    norm = norm_over(replicas, norm, math.inf, identity)
    return norm_over_stages(stages, norm, norm_type, identity).to(dtype)


def pipeline_of(given: dist.ProcessGroup | None, found: Iterable[Ranks]) -> Ranks:
    """Ranks with the other stages: `given`, or those that a shard names."""
    if given is not None:
        return Ranks.of(given)
    return next((ranks for ranks in found if ranks.size > 1), ALONE)


def identity_of_norm(shards: Iterable[Identified]) -> Identity | None:
    """Identity that collectives of a norm carry; None if those of these shards carry none."""
    first = next((found for shard in shards if (found := shard.identify(Action.NORM))), None)
    return None if first is None else Identity(Action.NORM, first.model, is_early=first.step == 0)


def require_same_grid(grids: Iterable[Grid]) -> None:
    """Checks that no unit has gradients that only some of the ranks share (experts).

    Raises:
        ValueError: if some grids have fewer ranks than others.
    """
    sizes = sorted({grid.num_ranks for grid in grids})
    if len(sizes) > 1:
        raise ValueError(f"some units are spread over {sizes[0]} ranks, not {sizes[-1]}; clip them alone")


def widest(grads: Iterable[Tensor]) -> torch.dtype:
    """Dtype of a norm: FP32 at least, because 16 bits overflow, or lose digits, in the powers."""
    return functools.reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Coefficient to multiply gradients of this norm by: 0-dim, at most 1, NaN if the norm is."""
    # The constant of `torch.nn.utils.clip_grad_norm_`, for the same bits.
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_grads(grads: list[Tensor], coefficient: Tensor) -> None:
    """Multiplies gradients, all on one device, in place."""
    if grads:
        # Also by 1, which changes no bit: to find out whether it is 1, the host would wait for the device.
        torch._foreach_mul_(grads, coefficient.to(grads[0].device))


def local_norm(grads: Sequence[Tensor], dtype: torch.dtype, device: torch.device, norm_type: float) -> Tensor:
    """Norm of this rank's gradients: 0-dim, on `device`."""
    norms = torch._foreach_norm(list(grads), norm_type, dtype=dtype) if grads else []
    return _norm_of(norms, dtype, device, norm_type)


def unless_finite(norm: Tensor) -> Tensor:
    """Returns 0 for a finite norm, which other ranks need not know, otherwise the norm."""
    return torch.where(norm < math.inf, 0.0, norm)


def _all_of(gradients: Gradients) -> list[Tensor]:
    return [grad for _, grads in gradients for _, grad in grads]


def _norm_of(norms: Sequence[Tensor], dtype: torch.dtype, device: torch.device, norm_type: float) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)


def norm_over(partners: Sequence[Ranks], norm: Tensor, norm_type: float, identity: Identity | None) -> Tensor:
    """Combines per-rank norms, one or several in a tensor, into the norms over all these ranks."""
    several = [ranks for ranks in partners if ranks.size > 1]
    if not several:
        return norm
    powers = norm if math.isinf(norm_type) else norm**norm_type
    for ranks in several:
        # Gathered, so that all ranks, of whatever groups, add in the same order: their norms have the same
        # bits, and parameters that several ranks have stay equal.
        everyones = powers.new_empty(ranks.size, *powers.shape)
        with launch(ranks, identity, powers.device):
            all_gather(everyones.view(-1), powers.reshape(-1), ranks)
        powers = everyones.amax(0) if math.isinf(norm_type) else everyones.sum(0)
    return powers if math.isinf(norm_type) else powers ** (1.0 / norm_type)


def norms_of(
    parts: Sequence[Tensor],
    places: Sequence[tuple[tuple[Ranks, ...], bool]],
    device: torch.device,
    norm_type: float,
    identity: Identity | None,
) -> list[Tensor]:
    """Norms of several gradients, each by itself, over the ranks that have parts of it.  Collective.

    Args:
        parts: what this rank has of each.
        places: of each, the groups of ranks with the other parts, and whether this rank counts its own.
        device: device to communicate on.
        norm_type: order of the norms.
        identity: what the collectives carry.
    """
    dtype = widest(parts)
    norms = [torch.zeros((), dtype=dtype, device=device)] * len(parts)
    # Some norms of an empty tensor are not zero.
    counted = [n for n, (_, is_counted) in enumerate(places) if is_counted and parts[n].numel()]
    if counted:
        local = torch._foreach_norm([parts[n] for n in counted], norm_type, dtype=dtype)
        for index, norm in zip(counted, local, strict=True):
            norms[index] = norm.to(device)
    by_partners: dict[tuple[Ranks, ...], list[int]] = {}
    for index, (partners, _) in enumerate(places):
        by_partners.setdefault(partners, []).append(index)
    for partners, indices in by_partners.items():
        own = torch.stack([norms[index] for index in indices])
        over_ranks = norm_over(partners, own, norm_type, identity).unbind()
        for index, norm in zip(indices, over_ranks, strict=True):
            norms[index] = norm
    return norms


def norm_over_stages(stages: Ranks, norm: Tensor, norm_type: float, identity: Identity | None) -> Tensor:
    """Combines the norms of all stages, which may have other dtypes, and other settings."""
    if stages.size == 1:
        return norm
    return norm_over((stages,), norm.double(), norm_type, identity or Identity(Action.NORM))


# ---- whether a step is taken ------------------------------------------------------------------------------

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
    grads = [*alone, *_all_of(gradients)]
    identity = identity_of_norm(shard for shard, _ in gradients)
    # The grid with most ranks includes those of all others.
    largest = max(grids, key=lambda grid: (grid.num_ranks, grid.tensor.size), default=None)
    together = [*tensor_parallel, *(() if largest is None else largest.dimensions)]
    worst = norm_over(together, local_norm(grads, widest(grads), device, 2.0), math.inf, identity)
    if stages.size > 1:
        # Other stages may join this as a part of their norm.
        worst = norm_over_stages(stages, unless_finite(worst), math.inf, identity)
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
                f"{what} in the last optimizer step, so that it changed nothing on any rank; look for NaN or "
                'overflow in its backward, or leave out such steps with nonfinite="skip"'
            )
