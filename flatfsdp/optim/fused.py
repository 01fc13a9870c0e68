"""`FusedOptimizer`: one step over all parameters in one pass; the base class of AdamW and SGD.

In:   parameters with gradients, in `.main_grad` if that is there, otherwise in `.grad`.
Out:  new values; for flat shards (`contract/flat_shard.py`) also the next compute shard and the amaxes.
Next: the engine gathers the compute shard as it is.

    norm of all gradients -> scale, and verdict -> kernel: gradient, states, parameter, copy, amax

All of it runs on the device.  The host does not know whether a step is taken (`clip.py`), so quantities
that depend on the number of steps, such as a bias correction, are computed on the device, too.
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
from flatfsdp.optim.clip import Awaited, NonFinite, Verdict, clip_coefficient, judge, pipeline_of
from flatfsdp.optim.joined import STEP, Due, DuePiece, Joined, Updated, updated


class LaunchKey(NamedTuple):
    """Properties that all runs in one launch share.

    Attributes:
        dtypes: dtypes of the parameter, the gradient and each state.
        rounding: dtype that values of a flat shard are rounded to; None for an ordinary parameter.
        variant: variant of the optimizer's formula.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    is_contiguous: bool
    rounding: torch.dtype | None
    variant: bool


class _Plan(NamedTuple):
    """Parameters that steps update, valid as long as the parameter groups have these parameters."""

    groups: list[tuple[dict[str, Any], list[Tensor]]]
    updated: list[Updated]

    def is_of(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        # By identity: `==` of tensors would compare their elements.  Parameter by parameter, because a user
        # may change a group's list in place.
        return len(self.groups) == len(param_groups) and all(
            own is group
            and len(parameters) == len(group["params"])
            and all(map(is_, parameters, group["params"]))
            for (own, parameters), group in zip(self.groups, param_groups, strict=True)
        )


class Formula(NamedTuple):
    """Inputs of the optimizer's formula for one parameter.

    Attributes:
        states: states that are updated along with it.
        numbers: numbers that the host knows.
        variant: variant of the formula.
    """

    states: list[Tensor]
    numbers: Sequence[float]
    variant: bool = False


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimizers that step flat shards in one pass: clip, update, and write the next compute shard.

    Args:
        params: parameters of a FlatFSDP module, groups from `flatfsdp.param_groups`, ordinary parameters, or
            several of these.
        defaults: options of parameter groups.
        max_grad_norm: clip gradients to this norm over all ranks, while they are read; None: do not clip.
        pp_group: ranks with the other stages of a pipeline, whose gradients count in the norm, too; default:
            the group of the model's `FlatStage`.
        nonfinite: what a step does if gradients are not finite: "raise", "skip" or "step".

    Attributes:
        max_grad_norm: largest norm of gradients; may be changed between steps.
        grad_norm: norm of the last step's gradients before clipping, 0-dim, on the device.  None with
            `nonfinite="step"` and no `max_grad_norm`, and if no rank knows it (experts).
        skipped_steps: number of steps left out, refused ones included: int64, 0-dim, on the device.

    Raises:
        ValueError: if an option is out of its range, or a parameter is not a real floating-point tensor.
    """

    # None in copies: process groups cannot be copied, nor is a copy told what the original is told.
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
        # On the device that decides: skipped steps are added up there, and no host waits to count them.
        device = self._device(self._shards(self._updated()))
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def nonfinite(self) -> NonFinite:
        """What a step does if gradients are not finite on any rank; may be changed between steps.

        "raise"   changes nothing, and raises: on a CPU at once, on a GPU in the next step
        "skip"    changes nothing, as if there had been no such step
        "step"    updates regardless: with `max_grad_norm`, a NaN norm makes all parameters NaN
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
    def _counts(self, group: dict[str, Any]) -> bool:
        """Whether the formula depends on the number of steps, so that there is a state `STEP`."""

    @abstractmethod
    def _formula(self, due: Due) -> Formula:
        """Inputs of the formula for a parameter; the first call makes new states."""

    @abstractmethod
    def _on_device(self, counted: Sequence[tuple[Due, Tensor]]) -> Sequence[Tensor]:
        """Numbers of the formula, one tensor each, that depend on step counts, which include this step.

        Args:
            counted: updated parameters, each with a count; several, if parts of it have had other steps.
        """

    @abstractmethod
    def _update(
        self, runs: Sequence[Run], kind: LaunchKey, grad_scale: Tensor | None, taken: Tensor | None
    ) -> None:
        """Launches the kernel on runs of one `LaunchKey`."""

    # ---- torch.optim.Optimizer --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, after a check of its options."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        # Only now is there a list: parameters may come as a generator, which can be read once.
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"parameters must be floating-point, not {parameter.dtype}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, after a check of its options."""
        # All groups before anything is loaded: a refused state dict has changed nothing.
        for group in state_dict["param_groups"]:
            self._check_options({**self.defaults, **group})
        super().load_state_dict(state_dict)
        # The verdict on the last step does not concern the loaded state.
        self._awaited = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, those of flat shards, too."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters():
            main_grad = MAIN_GRAD.of(parameter)
            if main_grad is not None:
                # Another owner's buffer, which fused weight gradients are added to, has to stay.
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
            Nothing has changed when one of them is raised.
        """
        # Before anything of this step, the closure included: whoever catches the error still has the
        # gradients, and may step with them.
        self.raise_if_nonfinite()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # This checks all gradients, before the first collective and before the first write.
        due = [one for each in self._updated() if (one := each.due()) is not None]
        coefficient, taken = self._decide(due)
        # Counts first, as in the states of PyTorch's optimizers.
        counts = [
            one.updated.counts(self.state, one.pieces) if self._counts(one.updated.group) else None
            for one in due
        ]
        formulas = [self._formula(one) for one in due]
        # Before counts and states are written: from here on, views have the same tensors as the run.
        for one in due:
            one.updated.hand_out(self.state)
        numbers = self._count(due, counts, taken)
        by_kind: dict[LaunchKey, list[Run]] = {}
        for one, formula, of_one in zip(due, formulas, counts, strict=True):
            on_device = [
                None if step is None else numbers[step] for step in of_one or [None] * len(one.pieces)
            ]
            kind, runs = self._runs(one, formula, on_device)
            by_kind.setdefault(kind, []).extend(runs)
        # One launch for all runs that one compiled kernel can take.
        for kind, of_kind in by_kind.items():
            wide = wide_of(kind.dtypes[0])
            grad_scale = None if coefficient is None else coefficient.to(kind.device, wide)
            self._update(of_kind, kind, grad_scale, None if taken is None else taken.to(kind.device))
        # The kernel bypasses the dispatcher, which would count these writes.
        torch.autograd.graph.increment_version([one.updated.parameter for one in due])
        # After the versions: a shard remembers the version that its copy was made of.
        for one in due:
            if one.updated.shard is not None:
                one.updated.shard.cast_done()
        return loss

    def raise_if_nonfinite(self) -> None:
        """Raises once if the last step was refused.

        Waits until the device has decided on that step.  `step` and checkpoints call it; call it yourself
        after the very last step.

        Raises:
            NonFiniteGradientError: on all ranks, with `nonfinite="raise"`, if gradients of the last step were
                not finite.
        """
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.check()

    def state_dict(self) -> dict[str, Any]:
        """State dict in the form of PyTorch's optimizers.

        Raises:
            NonFiniteGradientError: as long as `raise_if_nonfinite` would raise.
        """
        if self._awaited is not None:
            # Check without clearing: perhaps only some ranks ask for a state dict, but `step` raises on all.
            self._awaited.check()
        state_dict = super().state_dict()
        # Loaders such as `torch.optim.AdamW` count for each parameter separately.
        state_dict["state"] = {
            index: {**state, STEP: state[STEP].clone()} if isinstance(state.get(STEP), Tensor) else state
            for index, state in state_dict["state"].items()
        }
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """State for copies of the optimizer, which its `state_dict` does not include."""
        own = ("max_grad_norm", "grad_norm", "_nonfinite", "skipped_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores state; also part of `load_state_dict`."""
        super().__setstate__(state)
        self._plan = None

    # ---- one step ---------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _updated(self) -> list[Updated]:
        """Units of update: views are joined as long as their states are."""
        # Nothing tells when a user edits `param_groups` or `state`, so each step compares both.  Views whose
        # states could not be joined stay apart as long as the plan is valid: to try again would wait for the
        # device in each step.
        plan = self._plan
        if (
            plan is None
            or not plan.is_of(self.param_groups)
            or not all(each.has_its_state(self.state) for each in plan.updated if isinstance(each, Joined))
        ):
            groups = [(group, list(group["params"])) for group in self.param_groups]
            plan = self._plan = _Plan(groups, updated(self.param_groups, self.state))
        return plan.updated

    def _shards(self, updated: Iterable[Updated]) -> list[FlatShard]:
        """Shards of all parameters, in the same order on all ranks, whichever local shard comes first.

        Parameter groups list views module by module; norms add them up unit by unit, as for flat parameters.
        """
        updated = list(updated)
        groups = [id(group) for group in self.param_groups]
        models = list(dict.fromkeys(each.place[0] for each in updated))

        def place(each: Updated) -> tuple[int, int, int]:
            model, number = each.place
            return groups.index(id(each.group)), models.index(model), number

        shards = [each.shard for each in sorted(updated, key=place) if each.shard is not None]
        # A norm runs one collective for each group of partners, in the order in which they appear here.  The
        # name of a group is the same on all its ranks; which parameter comes first need not be.
        return sorted(shards, key=lambda shard: [ranks.name for ranks in shard.grid.partners])

    def _device(self, shards: Sequence[FlatShard]) -> torch.device:
        """The device on which norms are taken."""
        computing = (shard.device for shard in shards)
        own = (parameter.device for parameter in self._parameters())
        return next(computing, None) or next(own, torch.device("cpu"))

    def _decide(self, due: Sequence[Due]) -> tuple[Tensor | None, Tensor | None]:
        """Coefficient for gradients, and whether to take the step, each 0-dim; None where not needed.

        Raises:
            NonFiniteGradientError: if the step is refused and the host knows it.
        """
        # First: if something below raises, it must not show the norm of the step before.
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
        # Counted, and FP8 scales restored, before the error is raised: a refused step is undone whether or
        # not the caller goes on.
        self.skipped_steps = self.skipped_steps.to(taken.device).add_(taken == 0)
        for moved in dict.fromkeys(shard.moved for shard in shards):
            if moved is not None:
                moved.settle(taken, self)
        if self.nonfinite == "raise":
            self._awaited = Awaited.of(verdict)
            if self._awaited.arrived is None:
                # On a CPU the host knows already, and no kernel has to read the verdict.
                self.raise_if_nonfinite()
                return coefficient, None
        return coefficient, taken

    def _judge(self, due: Sequence[Due], shards: Sequence[FlatShard]) -> Verdict:
        grads = {one.updated.shard: one.grads for one in due if one.updated.shard is not None}
        alone = [grad for one in due if one.updated.shard is None for _, grad in one.grads]
        clips = self.max_grad_norm is not None
        # All trained parameters, because ranks may have gradients of different ones.
        ordinary = (each for each in self._parameters() if each.requires_grad and FLAT_SHARD.of(each) is None)
        sharing = {ranks for each in ordinary for ranks in _sharing(each, clips=clips)}
        return judge(
            [(shard, grads.get(shard, ())) for shard in shards],
            self._device(shards),
            alone=alone,
            # Sorted, because the first call for some ranks makes their group, and waits there for all of
            # them.
            tensor_parallel=[Ranks.among(ranks) for ranks in sorted(sharing)],
            stages=pipeline_of(self.pp_group, (shard.stages for shard in shards)),
            needs_norm=clips,
        )

    def _count(
        self, due: Sequence[Due], counts: Sequence[Sequence[Tensor | None] | None], taken: Tensor | None
    ) -> Mapping[Tensor, Tensor]:
        """Counts the step if it is taken; returns the numbers that depend on each count.

        Args:
            due: what the step updates.
            counts: for each of them, the counts of its pieces, if it is counted.
            taken: whether the step is taken; None: it is.
        """
        # Each count once: pieces with the same history share it.
        counted = {
            step: one
            for one, of_one in zip(due, counts, strict=True)
            for step in of_one or ()
            if step is not None
        }
        by_device: dict[torch.device, list[Tensor]] = {}
        for step in counted:
            by_device.setdefault(step.device, []).append(step)
        for device, steps in by_device.items():
            # A list, because a one-element tensor would be fetched to the host.
            torch._foreach_add_(steps, 1.0 if taken is None else [taken.to(device)] * len(steps))
        return dict(
            zip(counted, self._on_device([(one, step) for step, one in counted.items()]), strict=True)
        )

    def _runs(
        self, due: Due, formula: Formula, on_device: Sequence[Tensor | None]
    ) -> tuple[LaunchKey, list[Run]]:
        states, numbers, variant = formula
        values, shard = due.updated.parameter.detach(), due.updated.shard
        grad = due.grads[0].grad
        # Kernels index all tensors of a run alike.  A parameter that is not contiguous takes the way of plain
        # PyTorch, which reads any strides.
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
            return kind, [Run(values, grad, states, numbers, on_device[0])]
        # `runs` zeroes the amaxes, so call it only where the kernel will write all of them.
        compute, amaxes = shard.compute, shard.runs()
        return kind, [
            Run(
                values[start:stop],
                None
                if piece.grad is None
                else piece.grad[start - piece.start : stop - piece.start].contiguous(),
                [state[start:stop] for state in states],
                numbers,
                of_piece,
                None if compute is None else compute[start:stop],
                amax,
            )
            for piece, of_piece in zip(due.pieces, on_device, strict=True)
            for start, stop, amax in covering(piece, amaxes)
        ]


def _sharing(parameter: Tensor, *, clips: bool) -> Iterator[tuple[int, ...]]:
    """Ranks that share the layer of an ordinary parameter, by global number; none for most parameters.

    Args:
        parameter: the ordinary parameter.
        clips: whether the norm is needed; no rank knows it for such a layer.

    Raises:
        ValueError: if there are any, and the norm is needed or the ranks are unknown.
    """
    if not is_shared(parameter):
        return
    what = f"a parameter of shape {tuple(parameter.shape)} is of a layer that tensor-parallel ranks share"
    if clips:
        raise ValueError(
            f"max_grad_norm is set, and {what}: no rank knows the norm; shard the layer, or clip beforehand"
        )
    ranks = TENSOR_PARALLEL_RANKS.of(parameter)
    if not ranks:
        raise ValueError(
            f'{what}, without tensor_parallel_ranks; shard the layer with FlatFSDP, or set nonfinite="step"'
        )
    yield ranks


@cache
def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which parameters of this dtype are updated."""
    return torch.promote_types(dtype, torch.float32)


def covering(
    piece: DuePiece, runs: Sequence[tuple[int, int, Tensor]]
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Yields the runs in a piece, and the gaps between them, which cover it once; a run is in one piece."""
    end = piece.start
    for start, stop, amax in runs:
        if stop <= piece.start or start >= piece.stop:
            continue
        if not end <= start <= stop <= piece.stop:
            raise ValueError(
                f"run [{start}, {stop}) begins before {end} or ends behind {piece.stop}; runs ascend"
            )
        if start > end:
            yield end, start, None
        yield start, stop, amax
        end = stop
    if end < piece.stop:
        yield end, piece.stop, None
