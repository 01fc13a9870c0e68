"""One step over all parameters in one pass: what AdamW and SGD share.

In:   parameters with gradients, in `.grad`, or in `.main_grad` if that is there.
Out:  new values; of flat shards (`contract/flat_shard.py`) also the next compute shard and the amaxes.
Next: the engine gathers the compute shard as it is.

    norm of all gradients -> scale, and verdict -> kernel: gradient, states, parameter, copy, amax

All of it is one way round on the device.  The host does not know whether a step is taken (`verdict.py`), so
whatever depends on how many were, such as a bias correction, is computed on the device, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.flat_shard import FLAT_SHARD, FlatShard
from flatfsdp.contract.main_grad import MAIN_GRAD
from flatfsdp.contract.placement import is_shared
from flatfsdp.contract.tensor_parallel import TENSOR_PARALLEL_RANKS
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.optim.clip import clip_coefficient, pipeline_of
from flatfsdp.optim.joined import STEP, Joined, Updated, updated
from flatfsdp.optim.verdict import Awaited, NonFinite, Verdict, judge


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
    """What this step updates, and by which gradient."""

    updated: Updated
    grad: Tensor

    @property
    def parameter(self) -> Tensor:
        """The parameter that is updated."""
        return self.updated.parameter

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group with its options."""
        return self.updated.group

    @property
    def shard(self) -> FlatShard | None:
        """The flat shard that the parameter is; None for an ordinary one."""
        return self.updated.shard


class _Plan(NamedTuple):
    """What steps update, as long as the parameter groups have these parameters."""

    groups: list[tuple[dict[str, Any], list[Tensor]]]
    updated: list[Updated]

    def is_of(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        return len(self.groups) == len(param_groups) and all(
            own is group
            and len(parameters) == len(group["params"])
            and all(map(is_, parameters, group["params"]))
            for (own, parameters), group in zip(self.groups, param_groups, strict=True)
        )


class Formula(NamedTuple):
    """What the optimizer's formula takes for one parameter.

    Attributes:
        states: updated along with it.
        numbers: that the host knows.
        variant: of the formula.
    """

    states: list[Tensor]
    numbers: Sequence[float]
    variant: bool = False


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Steps flat shards in one pass: clips, updates, and writes what is gathered next.

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these.
        defaults: options of parameter groups.
        max_grad_norm: gradients are scaled to a norm, over all ranks, of at most this while they are read.
        pp_group: ranks that have other pipeline stages, whose gradients count in the norm, too; default: as
            `FlatStage` has said.
        nonfinite: what a step does whose gradients are not finite.

    Attributes:
        max_grad_norm: may be changed between steps.
        grad_norm: of the last step, before scaling: 0-dim, on the device.  None with `nonfinite="step"` and
            no `max_grad_norm`, and where no rank knows it (experts).
        skipped_steps: how many steps were left out, refused ones too: int64, 0-dim, on the device.

    Raises:
        ValueError: if an option is out of its range, or a parameter is not a real floating-point tensor.
    """

    # A copy has none: process groups cannot be copied, nor is it told of what the original has done.
    pp_group: dist.ProcessGroup | None = None
    _awaited: Awaited | None = None
    _plan: _Plan | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        max_grad_norm: float | None,
        pp_group: dist.ProcessGroup | None,
        nonfinite: NonFinite,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}; it must be positive, or None not to clip")
        self.max_grad_norm = max_grad_norm
        self.pp_group = pp_group
        self.nonfinite = nonfinite
        self.grad_norm: Tensor | None = None
        super().__init__(params, defaults)
        device = self._device(self._shards(self._updated()))
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def nonfinite(self) -> NonFinite:
        """What a step does whose gradients are not finite, on any rank; may be changed between steps.

        "raise"   changes nothing, and raises: on a CPU at once, on a GPU in the next step
        "skip"    changes nothing, as if there had been no such step
        "step"    goes on, which makes all parameters NaN if the norm is and `max_grad_norm` is set
        """
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, value: NonFinite) -> None:
        if value not in get_args(NonFinite):
            raise ValueError(f'nonfinite is {value!r}; it must be "raise", "skip" or "step"')
        self._nonfinite: NonFinite = value

    # ---- what a subclass says ---------------------------------------------------------------------------

    @abstractmethod
    def _check_options(self, group: dict[str, Any]) -> None:
        """Raises ValueError for an option of a parameter group that is out of its range."""

    @abstractmethod
    def _formula(self, due: Due) -> Formula:
        """What the formula takes for a parameter; the first time it gets new states, with no step counted.

        A formula that depends on how many steps there were has a state `STEP`, which is counted here.
        """

    @abstractmethod
    def _on_device(self, counted: Sequence[tuple[Due, Tensor]]) -> Mapping[Tensor, Tensor]:
        """By parameter: numbers of the formula that depend on the count of steps; this one is counted.

        Args:
            counted: what is updated, and its count.
        """

    @abstractmethod
    def _update(
        self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None, taken: Tensor | None
    ) -> None:
        """Launches the kernel."""

    # ---- torch.optim.Optimizer --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, after a check of its options."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"{type(self).__name__} updates floating-point parameters"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, after a check of its options."""
        for group in state_dict["param_groups"]:
            self._check_options({**self.defaults, **group})
        super().load_state_dict(state_dict)
        # Whatever the last step was, its parameters and moments are others now.
        self._awaited = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, those of flat shards, too."""
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
        """Updates every parameter that has a gradient.  Collective.

        With `nonfinite="step"` and no `max_grad_norm` it is not collective.

        Args:
            closure: computes the loss again, and gradients with it.

        Returns:
            What `closure` returns.

        Raises:
            NonFiniteGradientError: with `nonfinite="raise"`, on all ranks: on a CPU if gradients are not
                finite, on a GPU if those of the step before were not.
            ValueError: if a gradient does not fit its parameter; for a parameter of a layer that several
                ranks share and that is in no FlatFSDP, with `max_grad_norm`, or if the layer has not said
                which ranks these are.
            RuntimeError: if gradients are accumulated and not yet reduced.
            Nothing is changed then.
        """
        self.raise_if_nonfinite()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = self._due()
        coefficient, taken = self._decide(due)
        formulas = [self._formula(one) for one in due]
        for one in due:
            one.updated.hand_out(self.state)
        on_device = self._count(due, taken)
        by_kind: dict[LaunchKey, list[Run]] = {}
        for one, formula in zip(due, formulas, strict=True):
            kind, runs = self._runs(one, formula, on_device.get(one.parameter))
            by_kind.setdefault(kind, []).extend(runs)
        for kind, of_kind in by_kind.items():
            wide = wide_of(kind.dtypes[0])
            grad_scale = None if coefficient is None else coefficient.to(kind.device, wide)
            self._update(of_kind, kind, grad_scale, None if taken is None else taken.to(kind.device))
        # A kernel writes past the dispatcher, which counts writes.
        torch.autograd.graph.increment_version([one.parameter for one in due])
        for one in due:
            if one.shard is not None:
                one.shard.cast_done()
        return loss

    def raise_if_nonfinite(self) -> None:
        """Raises for the last step, if it was refused; once.

        Waits for the device, up to where it decided on that step.  `step` and checkpoints call it; call it
        after the last step of all.

        Raises:
            NonFiniteGradientError: if gradients of the last step were not finite, with `nonfinite="raise"`;
                on all ranks.
        """
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.check()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, as PyTorch's optimizers return it.

        Raises:
            NonFiniteGradientError: as long as `raise_if_nonfinite` would raise.
        """
        if self._awaited is not None:
            # Only looked at: a state dict may be asked of some ranks alone, and `step` raises on all.
            self._awaited.check()
        state_dict = super().state_dict()
        # Optimizers that load it, such as `torch.optim.AdamW`, count for each parameter by itself.
        state_dict["state"] = {
            index: {**state, STEP: state[STEP].clone()} if isinstance(state.get(STEP), Tensor) else state
            for index, state in state_dict["state"].items()
        }
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the optimizer; its `state_dict` has none of these."""
        own = ("max_grad_norm", "grad_norm", "_nonfinite", "skipped_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also part of `load_state_dict`."""
        super().__setstate__(state)
        self._plan = None

    # ---- one step ---------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _updated(self) -> list[Updated]:
        """What steps update: joined, where the parameters are views and their states are still joined."""
        plan = self._plan
        if (
            plan is None
            or not plan.is_of(self.param_groups)
            or not all(each.has_its_state(self.state) for each in plan.updated if isinstance(each, Joined))
        ):
            groups = [(group, list(group["params"])) for group in self.param_groups]
            plan = self._plan = _Plan(groups, updated(self.param_groups, self.state))
        return plan.updated

    def _due(self) -> list[Due]:
        due: list[Due] = []
        plan: list[Updated] = []
        for each in self._updated():
            if not isinstance(each, Joined):
                plan.append(each)
                due += _due_alone(each)
            elif (joint := each.grad) is not None:
                plan.append(each)
                due.append(Due(each, joint))
            elif any(grad_of(view) is not None for view, start, stop in each.views if start < stop):
                parts = each.parted(self.state)
                plan += parts
                due += [one for part in parts for one in _due_alone(part)]
            else:
                plan.append(each)
        assert self._plan is not None
        self._plan = self._plan._replace(updated=plan)
        return due

    def _shards(self, updated: Iterable[Updated]) -> list[FlatShard]:
        """Those of all parameters, in the same order on all ranks, whichever of their portions is first.

        Views are listed module by module, and are added up unit by unit, as flat parameters are.
        """
        updated = list(updated)
        of_group = {id(group): index for index, group in enumerate(self.param_groups)}
        of_model = {model: index for index, model in enumerate(dict.fromkeys(each.model for each in updated))}
        in_order = sorted(
            updated, key=lambda each: (of_group[id(each.group)], of_model[each.model], each.number)
        )
        shards = [each.shard for each in in_order if each.shard is not None]
        return sorted(shards, key=lambda shard: [ranks.name for ranks in shard.grid.partners])

    def _device(self, shards: Sequence[FlatShard]) -> torch.device:
        """The device on which norms are taken."""
        computing = (shard.device for shard in shards)
        own = (parameter.device for parameter in self._parameters())
        return next(computing, None) or next(own, torch.device("cpu"))

    def _decide(self, due: Sequence[Due]) -> tuple[Tensor | None, Tensor | None]:
        """What to multiply gradients by, and whether to take the step, each 0-dim; None: do not ask.

        Raises:
            NonFiniteGradientError: if the step is refused, and the host knows it.
        """
        self.grad_norm = None
        if self.max_grad_norm is None and self.nonfinite == "step":
            return None, None
        assert self._plan is not None
        shards = self._shards(self._plan.updated)
        verdict = self._judge(due, shards)
        coefficient = None
        if verdict.is_norm:
            self.grad_norm = verdict.worst
        if self.max_grad_norm is not None:
            coefficient = clip_coefficient(verdict.worst, self.max_grad_norm)
        if self.nonfinite == "step":
            return coefficient, None
        taken = verdict.taken
        self.skipped_steps = self.skipped_steps.to(taken.device).add_(taken == 0)
        for moved in dict.fromkeys(shard.moved for shard in shards):
            if moved is not None:
                moved.settle(taken, self)
        if self.nonfinite == "raise":
            self._awaited = Awaited.of(verdict)
            if self._awaited.arrived is None:
                self.raise_if_nonfinite()
                return coefficient, None
        return coefficient, taken

    def _judge(self, due: Sequence[Due], shards: Sequence[FlatShard]) -> Verdict:
        grads = {one.shard: one.grad for one in due if one.shard is not None}
        alone = [one for one in due if one.shard is None]
        clips = self.max_grad_norm is not None
        # Counts all that are trained: ranks may have gradients of different ones.
        ordinary = (each for each in self._parameters() if each.requires_grad and FLAT_SHARD.of(each) is None)
        sharing = {ranks for each in ordinary for ranks in _sharing(each, clips=clips)}
        return judge(
            [(shard, [grads[shard]] if shard in grads else []) for shard in shards],
            self._device(shards),
            alone=[one.grad for one in alone],
            tensor_parallel=[Ranks.among(ranks) for ranks in sorted(sharing)],
            stages=pipeline_of(self.pp_group, (shard.stages for shard in shards)),
            needs_norm=clips,
        )

    def _count(self, due: Sequence[Due], taken: Tensor | None) -> Mapping[Tensor, Tensor]:
        """Counts the step where it is taken, and returns what the formula makes of the counts."""
        counted = [(one, step) for one in due if (step := one.updated.count(self.state)) is not None]
        by_device: dict[torch.device, list[Tensor]] = {}
        for _, step in counted:
            by_device.setdefault(step.device, []).append(step)
        for device, steps in by_device.items():
            # A list, because a number of one element is fetched to the host.
            torch._foreach_add_(steps, 1.0 if taken is None else [taken.to(device)] * len(steps))
        return self._on_device(counted)

    def _runs(self, due: Due, formula: Formula, on_device: Tensor | None) -> tuple[LaunchKey, Iterable[Run]]:
        states, numbers, variant = formula
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
            return kind, [Run(values, grad, states, numbers, on_device)]
        return kind, (
            Run(
                values[start:stop],
                grad[start:stop],
                [state[start:stop] for state in states],
                numbers,
                on_device,
                None if shard.compute is None else shard.compute[start:stop],
                amax,
            )
            for start, stop, amax in covering(values.numel(), shard.runs())
        )


def _sharing(parameter: Tensor, *, clips: bool) -> Iterator[tuple[int, ...]]:
    """The ranks that share the layer of an ordinary parameter, by their global numbers; none for most.

    Args:
        clips: whether the norm is needed, which no rank knows then.

    Raises:
        ValueError: if there are any, and the norm is needed or nobody has said which ranks these are.
    """
    if not is_shared(parameter):
        return
    what = f"a parameter of shape {tuple(parameter.shape)} is of a layer that tensor-parallel ranks share"
    if clips:
        raise ValueError(
            f"max_grad_norm is set, and {what}, so that no rank knows the norm; shard the layer with "
            "FlatFSDP, or clip gradients before the step, without max_grad_norm"
        )
    ranks = TENSOR_PARALLEL_RANKS.of(parameter)
    if not ranks:
        raise ValueError(
            f"{what} and that does not say which ranks these are (tensor_parallel_ranks), so nobody can tell "
            'if all of their gradients are finite; shard the layer with FlatFSDP, or set nonfinite="step"'
        )
    yield ranks


def _due_alone(updated: Updated) -> list[Due]:
    """One parameter, if it has a gradient."""
    grad = grad_of(updated.parameter)
    if grad is None:
        return []
    check_grad(updated.parameter, grad)
    # A view's is of a class of its own, which answers for all ranks.
    return [Due(updated, grad if updated.shard is None else grad.as_subclass(Tensor))]


def step_count(value: Tensor | float, parameter: Tensor) -> Tensor:
    """A count of updates as the device goes on with it: FP32, 0-dim, beside the parameter, and a copy."""
    if isinstance(value, Tensor):
        return value.detach().to(parameter.device, torch.float32, copy=True)
    return torch.full((), value, dtype=torch.float32, device=parameter.device)


@cache
def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype that parameters of this dtype are updated in."""
    return torch.promote_types(dtype, torch.float32)


def grad_of(parameter: Tensor) -> Tensor | None:
    """`.main_grad`, which an engine or a fused weight gradient adds up, or else `.grad`."""
    main_grad = MAIN_GRAD.of(parameter)
    return parameter.grad if main_grad is None else main_grad


def check_grad(parameter: Tensor, grad: Tensor) -> None:
    """Refuses a gradient that does not fit its parameter."""
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
