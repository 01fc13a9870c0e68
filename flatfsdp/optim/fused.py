"""One step over all parameters in one pass: what AdamW and SGD share.

In:   parameters with gradients, in `.grad`, or in `.main_grad` if that is there.
Out:  new values; of flat shards (`contract/flat_shard.py`) also the next compute shard and the amaxes.
Next: the engine gathers the compute shard as it is.

    norm of all gradients -> one number on the device -> kernel: gradient, states, parameter, copy, amax
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.contract.flat_shard import FLAT_SHARD, FlatShard
from flatfsdp.contract.main_grad import MAIN_GRAD
from flatfsdp.contract.placement import is_shared
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.optim.clip import clip_coefficient, norm_over_ranks, pipeline_of


class LaunchKey(NamedTuple):
    """What runs that go into one launch have in common.

    Attributes:
        dtypes: of the parameter, the gradient and each state.
        rounding: of a flat shard; None for an ordinary parameter.
        variant: of the optimizer's formula.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    is_contiguous: bool
    rounding: torch.dtype | None
    variant: bool


class Due(NamedTuple):
    """A parameter that this step updates."""

    parameter: Tensor
    grad: Tensor
    group: dict[str, Any]
    shard: FlatShard | None


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """
    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these.
        defaults: options of parameter groups.
        max_grad_norm: gradients are scaled to a norm, over all ranks, of at most this while they are read.
        pp_group: ranks that have other pipeline stages, whose gradients count in the norm, too; default: as
            `FlatStage` has said.

    Attributes:
        max_grad_norm: may be changed between steps.
        grad_norm: of the last step, before scaling: 0-dim, on the device; None without `max_grad_norm`.

    Raises:
        ValueError: if an option is out of its range, or a parameter is not a real floating-point tensor.
    """

    # A copy has none: process groups cannot be copied.
    pp_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        max_grad_norm: float | None,
        pp_group: dist.ProcessGroup | None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}; it must be positive, or None not to clip")
        self.max_grad_norm = max_grad_norm
        self.pp_group = pp_group
        self.grad_norm: Tensor | None = None
        super().__init__(params, defaults)

    # ---- what a subclass says ---------------------------------------------------------------------------

    @abstractmethod
    def _check_options(self, group: dict[str, Any]) -> None:
        """Raises ValueError for an option of a parameter group that is out of its range."""

    @abstractmethod
    def _advance(self, due: Due) -> tuple[list[Tensor], Sequence[float], bool]:
        """Counts the step: the states (new ones the first time), numbers and variant of the formula."""

    @abstractmethod
    def _update(self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None) -> None:
        """Launches the kernel."""

    # ---- torch.optim.Optimizer --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"{type(self).__name__} updates floating-point parameters"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            self._check_options({**self.defaults, **group})
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self._parameters():
            main_grad = MAIN_GRAD.of(parameter)
            if main_grad is not None:
                # Somebody else's buffer, to which fused weight gradients are added, has to stay.
                if set_to_none and FLAT_SHARD.of(parameter) is not None:
                    MAIN_GRAD.leave(parameter, None)
                else:
                    main_grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.  Collective if `max_grad_norm` is set.

        Args:
            closure: computes the loss again, and gradients with it.

        Returns:
            What `closure` returns.

        Raises:
            ValueError: if a gradient does not fit its parameter; with `max_grad_norm`, for a parameter of a
                layer that several ranks share and that is in no FlatFSDP.
            RuntimeError: if gradients are accumulated and not yet reduced.
            Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = list(self._due())
        coefficient = self._clip(due)
        by_kind: dict[LaunchKey, list[Run]] = {}
        for one in due:
            kind, runs = self._runs(one)
            by_kind.setdefault(kind, []).extend(runs)
        for kind, of_kind in by_kind.items():
            wide = torch.promote_types(kind.dtypes[0], torch.float32)
            grad_scale = None if coefficient is None else coefficient.to(kind.device, wide)
            self._update(of_kind, kind, grad_scale)
        # A kernel writes past the dispatcher, which counts writes.
        torch.autograd.graph.increment_version([one.parameter for one in due])
        for one in due:
            if one.shard is not None:
                one.shard.cast_done()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the optimizer; its `state_dict` has none of these."""
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "grad_norm": self.grad_norm}

    # ---- one step ---------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _due(self) -> Iterator[Due]:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = grad_of(parameter)
                if grad is not None:
                    check_grad(parameter, grad)
                    yield Due(parameter, grad, group, FLAT_SHARD.of(parameter))

    def _clip(self, due: Sequence[Due]) -> Tensor | None:
        """Takes the norm; what to multiply gradients by, 0-dim, or None."""
        self.grad_norm = None
        if self.max_grad_norm is None:
            return None
        shards = [shard for shard in map(FLAT_SHARD.of, self._parameters()) if shard is not None]
        # All ranks take part in the same order, whichever of their portions comes first and has a gradient.
        shards.sort(key=lambda shard: [ranks.name for ranks in shard.grid.partners])
        grads = {one.shard: one.grad for one in due if one.shard is not None}
        alone = [one for one in due if one.shard is None]
        for one in alone:
            _require_alone(one.parameter)
        devices = [shard.device for shard in shards] or [one.grad.device for one in due]
        self.grad_norm = norm_over_ranks(
            [(shard, [grads[shard]] if shard in grads else []) for shard in shards],
            devices[0] if devices else torch.device("cpu"),
            alone=[one.grad for one in alone],
            stages=pipeline_of(self.pp_group, (shard.stages for shard in shards)),
        )
        return clip_coefficient(self.grad_norm, self.max_grad_norm)

    def _runs(self, due: Due) -> tuple[LaunchKey, Iterable[Run]]:
        states, numbers, variant = self._advance(due)
        values, grad, shard = due.parameter.detach(), due.grad, due.shard
        if values.is_contiguous():
            grad = grad.contiguous()
        tensors = [values, grad, *states]
        kind = LaunchKey(
            values.device,
            tuple(tensor.dtype for tensor in tensors),
            all(tensor.is_contiguous() for tensor in tensors),
            None if shard is None else shard.rounding,
            variant,
        )
        if shard is None:
            return kind, [Run(values, grad, states, numbers)]
        return kind, (
            Run(
                values[start:stop],
                grad[start:stop],
                [state[start:stop] for state in states],
                numbers,
                None if shard.compute is None else shard.compute[start:stop],
                amax,
            )
            for start, stop, amax in covering(values.numel(), shard.runs())
        )


def _require_alone(parameter: Tensor) -> None:
    """
    Raises:
        ValueError: for an ordinary parameter of a layer that several ranks share.
    """
    if is_shared(parameter):
        raise ValueError(
            f"max_grad_norm is set, and a parameter of shape {tuple(parameter.shape)} is of a layer that "
            "tensor-parallel ranks share, so that no rank knows the norm; wrap the layer with FlatFSDP, or "
            "clip gradients before the step, without max_grad_norm"
        )


def grad_of(parameter: Tensor) -> Tensor | None:
    """`.main_grad`, which an engine or a fused weight gradient adds up, or else `.grad`."""
    main_grad = MAIN_GRAD.of(parameter)
    return parameter.grad if main_grad is None else main_grad


def check_grad(parameter: Tensor, grad: Tensor) -> None:
    fits = grad.shape == parameter.shape and grad.device == parameter.device
    if grad.layout != torch.strided or not grad.is_floating_point() or not fits:
        kind = "sparse" if grad.layout != torch.strided else str(grad.dtype)
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} on {parameter.device} has a gradient of shape "
            f"{tuple(grad.shape)} on {grad.device}, {kind}; it must be dense, floating-point, and like it"
        )


def covering(numel: int, runs: Sequence[tuple[int, int, Tensor]]) -> Iterator[tuple[int, int, Tensor | None]]:
    """These runs and what is between them: all of [0, numel) once."""
    end = 0
    for start, stop, amax in runs:
        if not end <= start <= stop <= numel:
            raise ValueError(
                f"run [{start}, {stop}) begins before {end} or ends behind {numel}; they ascend, without an "
                "overlap, inside the parameter"
            )
        if start > end:
            yield end, start, None
        yield start, stop, amax
        end = stop
    if end < numel:
        yield end, numel, None
