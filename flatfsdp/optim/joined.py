"""Units of update: one parameter, or neighbouring views of one shard that one run of the kernel updates.

In:   parameter groups with views (`ViewedShard` of `contract/flat_shard.py`).
Out:  `Updated`, and what a step does to it: `Due`.
Next: `fused.py` iterates over these instead of over parameters.

    shard    | view 0 .......|gap| view 1 ....................|gap| view 2 .....|
    groups     decay               no decay                         no decay
    updated  [0 ................) [1 and 2 ...................................)

Neighbouring views of one parameter group are joined, from where the first one starts to where the next run
starts.  Joined views share one tensor of each state; each view has its part under its own name in the
optimizer's state.

A view that a step has not used keeps its values and its state, and its count.  It is a *piece* of its own
then, which the same launch only copies for the next forward:

    pieces   | 0: updated    | 1: idle, copied                | 2: updated      |
    counts     7               5                                7
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.contract.flat_shard import FLAT_SHARD, VIEWED_SHARD, FlatShard, GradAt, ViewedShard
from flatfsdp.contract.main_grad import MAIN_GRAD

STEP = "step"
"""Key of the state that counts updates of a parameter, as in `torch.optim.AdamW`."""

State = MutableMapping[Tensor, dict[str, Any]]
"""The optimizer's `state`, by parameter."""


class DuePiece(NamedTuple):
    """Elements [start, stop) of a unit of update that a step treats alike.

    Attributes:
        grad: their gradient; None if they are idle, and only copied.
        view: number of the first view in them; 0 for a single parameter.
    """

    start: int
    stop: int
    grad: Tensor | None
    view: int = 0


class Due(NamedTuple):
    """A unit of update in a step that updates some of it.

    Attributes:
        grads: gradients that count in a norm, with their starts in the unit of update; together they cover
            all elements whose gradient is not zero.
        pieces: what the step does to which elements; they cover everything but gaps.
    """

    updated: Updated
    grads: Sequence[GradAt]
    pieces: Sequence[DuePiece]


class Updated:
    """Unit of update: here a single parameter.

    Attributes:
        parameter: the tensor to update.
        group: the parameter group whose options apply.
        shard: the flat shard that it is a part of; None for an ordinary parameter.
    """

    def __init__(self, parameter: Tensor, group: dict[str, Any], shard: FlatShard | None) -> None:
        self.parameter = parameter
        self.group = group
        self.shard = shard

    @property
    def place(self) -> tuple[object, int]:
        """Model and number of the shard that these are local shards of; (None, 0) for ordinary parameters."""
        return None, 0

    def due(self) -> Due | None:
        """The gradient and the piece that a step updates now; None without a gradient."""
        grad = grad_of(self.parameter)
        if grad is None:
            return None
        check_grad(self.parameter, grad)
        # The gradient of a shard is a `ShardGrad`, which answers for all ranks.
        grad = grad if self.shard is None else grad.as_subclass(Tensor)
        return Due(self, [GradAt(0, grad)], [DuePiece(0, self.parameter.numel(), grad)])

    def state(self, states: State) -> dict[str, Any]:
        """The optimizer's state for it, but for counts, to be read and written; empty at first."""
        return states[self.parameter]

    def counts(self, states: State, pieces: Sequence[DuePiece]) -> list[Tensor | None]:
        """For each piece, its number of steps, 0-dim, made where there is none; None for idle ones."""
        state = states[self.parameter]
        if STEP not in state:
            state[STEP] = step_count(0, self.parameter)
        return [state[STEP]]

    def hand_out(self, states: State) -> None:
        """Gives the parameters what `state` and `counts` have got since."""


class Joined(Updated):
    """Unit of update of neighbouring views [first, last) of one shard.

    Args:
        start: first element of the shard that they cover.
        stop: end of these elements, with the gaps between the views.
    """

    def __init__(
        self, viewed: ViewedShard, group: dict[str, Any], first: int, last: int, start: int, stop: int
    ) -> None:
        # `detach`, unlike `.data`, keeps the version counter: a step's write has to count as one to the
        # shard.
        super().__init__(viewed.flat.detach()[start:stop], group, viewed.joined(start, stop))
        self._viewed = viewed
        self._first, self._last = first, last
        self._start, self._stop = start, stop
        # The views with elements, by their numbers.
        views = enumerate(viewed.views[first:last], start=first)
        self._views = {n: (view, a - start, b - start) for n, (view, a, b) in views if a < b}
        self._own: dict[str, Any] = {}
        # Views with the same history share one count.
        self._steps: dict[int, Tensor] = {}
        self._has_one_history = True
        self._handed_out: list[tuple[Tensor, dict[str, Any]]] = []
        self._is_handed_out = True

    @property
    def views(self) -> Sequence[Tensor]:
        """The views that have elements."""
        return [view for view, _, _ in self._views.values()]

    @property
    def place(self) -> tuple[object, int]:
        """The same object for all shards of a model, and the number of the shard in it."""
        return self._viewed.place

    def due(self) -> Due | None:
        """The gradients and pieces that a step updates or copies; None if no view has a gradient here."""
        if self._start == self._stop:
            return None
        joint = self._viewed.joint_grad(self._first, self._last)
        if joint is not None:
            grad = joint.flat[self._start : self._stop]
            grads_at = [GradAt(0, grad)]
            # Most steps: all views are used, and always were used together.
            if self._views and self._has_one_history and self._views.keys().isdisjoint(joint.idle):
                return Due(self, grads_at, [DuePiece(0, grad.numel(), grad, next(iter(self._views)))])
            # Idle parts of the gradient are zero, and stay in the norm, as in that of a flat parameter.
            return Due(self, grads_at, self._pieces(dict.fromkeys(self._views.keys() - joint.idle, grad)))
        # There is no joint gradient, or somebody has replaced a part of it, or taken one away.  Then each
        # view counts by itself, and one without a gradient is idle.
        grads: dict[int, Tensor] = {}
        for number, (view, _, _) in self._views.items():
            if (found := grad_of(view)) is not None:
                check_grad(view, found)
                grads[number] = found.as_subclass(Tensor)
        if not grads:
            return None
        grads_at = [GradAt(self._views[number][1], grad) for number, grad in grads.items()]
        return Due(self, grads_at, self._pieces(grads))

    def _pieces(self, grads: Mapping[int, Tensor]) -> list[DuePiece]:
        """Neighbours with one gradient and one history together, each up to where the next one starts.

        Args:
            grads: by view, its own gradient, or the one of all views together; idle views have none.
        """

        def told_apart_by(number: int) -> tuple[int, int]:
            # By identity: views with one gradient tensor, and one count, are updated by one run.
            return id(grads.get(number)), id(self._steps.get(number))

        firsts = [next(numbers) for _, numbers in groupby(self._views, told_apart_by)]
        edges = [0, *(self._views[first][1] for first in firsts[1:]), self.parameter.numel()]
        pieces = []
        for first, start, stop in zip(firsts, edges, edges[1:], strict=False):
            grad = grads.get(first)
            # As long as the run: the gradient of all its views together.
            if grad is not None and grad.numel() == self.parameter.numel():
                grad = grad[start:stop]
            elif grad is not None:
                # A gradient of its own is as long as its view, without the gap behind.
                _, start, stop = self._views[first]
            pieces.append(DuePiece(start, stop, grad, first))
        return pieces

    def state(self, states: State) -> dict[str, Any]:
        """The optimizer's state of all views together, but for counts."""
        return self._own

    def counts(self, states: State, pieces: Sequence[DuePiece]) -> list[Tensor | None]:
        """For each piece, its number of steps, 0-dim, made where there is none; None for idle ones."""
        # A single piece with counts has nothing to part: its views share one count, or are all idle.
        if len(pieces) > 1 or not self._steps:
            self._keep_apart(pieces)
        return [None if piece.grad is None else self._steps[piece.view] for piece in pieces]

    def _keep_apart(self, pieces: Sequence[DuePiece]) -> None:
        """Makes counts where there are none, and lets idle views not count along with others."""
        idle_from = {piece.view: piece.grad is None for piece in pieces}
        idle: list[int] = []
        new: Tensor | None = None
        is_idle = False
        for number in self._views:
            is_idle = idle_from.get(number, is_idle)
            if is_idle:
                idle.append(number)
            elif number not in self._steps:
                # One tensor for all new counts: these views begin a history together.
                new = self._steps[number] = step_count(0, self.parameter) if new is None else new
                self._is_handed_out = False
        # The step is about to be added in place to each count that an updated view has.  Idle views that
        # share such a count get a copy, one for all that go on sharing a history.
        counted = {id(step) for number, step in self._steps.items() if number not in idle}
        copies: dict[int, Tensor] = {}
        for number in self._steps.keys() & set(idle):
            step = self._steps[number]
            if id(step) in counted:
                self._steps[number] = copies.setdefault(id(step), step.clone())
                self._is_handed_out = False
        self._note_histories()

    def _note_histories(self) -> None:
        self._has_one_history = len({id(self._steps.get(number)) for number in self._views}) < 2

    def hand_out(self, states: State) -> None:
        """Gives each view its part of the state, as state dicts have it."""
        if self._is_handed_out:
            return
        self._handed_out = []
        for number, step in sorted(self._steps.items()):
            view, start, stop = self._views[number]
            parts = {STEP: step, **{key: value[start:stop] for key, value in self._own.items()}}
            # A dict of its own: what a user puts into the optimizer's state then differs from `parts`, and
            # `has_its_state` notices.
            states[view] = dict(parts)
            self._handed_out.append((view, parts))
        self._is_handed_out = True

    def has_its_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the optimizer's state is still the one that was handed out."""
        # A state that a view has got without being handed it is a change, too.
        if sum(bool(states.get(view)) for view in self.views) != len(self._handed_out):
            return False
        for view, parts in self._handed_out:
            found = states.get(view)
            if found is None or len(found) != len(parts):
                return False
            if not all(map(is_, found.values(), parts.values())):
                return False
        return True

    def take_over(self, states: State) -> bool:
        """Joins the views' separate states; returns False if they cannot be joined.

        Waits for the device, if there are any.
        """
        of_views = ((number, states.get(view) or {}) for number, (view, _, _) in self._views.items())
        # A state may be None in a state dict from elsewhere, where a momentum has not begun.
        own = {n: {k: v for k, v in state.items() if v is not None} for n, state in of_views}
        own = {number: state for number, state in own.items() if state}
        if not own:
            return True
        first = next(iter(own.values()))
        # One run has one formula: views that have other states than the first are updated one by one.
        if STEP not in first or any(state.keys() != first.keys() for state in own.values()):
            return False
        for number, state in own.items():
            _, start, stop = self._views[number]
            for key, value in state.items():
                shape = first[STEP].shape if key == STEP else (stop - start,)
                if not isinstance(value, Tensor) or (value.dtype, value.shape) != (first[key].dtype, shape):
                    return False
        # The only wait for the device, after a load and not in a step.  Views with equal counts share one
        # from now on: the formula cannot tell them apart.
        of_count: dict[float, Tensor] = {}
        counts = torch.stack([state[STEP].reshape(()) for state in own.values()]).tolist()
        for (number, state), count in zip(own.items(), counts, strict=True):
            self._steps[number] = of_count.setdefault(count, state[STEP].clone())
        self._note_histories()
        for key in first.keys() - {STEP}:
            like = first[key]
            # Zeros are right for gaps, and for views that have had no step.
            self._own[key] = torch.zeros_like(self.parameter, dtype=like.dtype, device=like.device)
            for number, state in own.items():
                _, start, stop = self._views[number]
                self._own[key][start:stop] = state[key]
        self._is_handed_out = False
        self.hand_out(states)
        return True


def updated(param_groups: Sequence[dict[str, Any]], states: State) -> list[Updated]:
    """Lists all units of update in the order of the parameters; joined views come at their first one."""
    group_of = {p: group for group in param_groups for p in group["params"] if VIEWED_SHARD.of(p) is not None}
    joined = {
        first: each
        for viewed in dict.fromkeys(VIEWED_SHARD.of(view) for view in group_of)
        if viewed is not None
        for first, each in _runs(viewed, group_of)
    }
    found: list[Updated] = []
    for group in param_groups:
        for parameter in group["params"]:
            if parameter not in group_of:
                found.append(Updated(parameter, group, FLAT_SHARD.of(parameter)))
            # A later view of a run, which is listed at its first one.
            elif (together := joined.get(parameter)) is None:
                continue
            elif together.take_over(states):
                found.append(together)
            else:
                found += [Updated(view, group, FLAT_SHARD.of(view)) for view in together.views]
    return found


def _runs(viewed: ViewedShard, group_of: Mapping[Tensor, dict[str, Any]]) -> Iterator[tuple[Tensor, Joined]]:
    """Yields runs of neighbouring views of one group, as `param_groups` cuts them, with their first view."""
    views, numel = viewed.views, viewed.flat.numel()
    groups = [group_of.get(view) for view, _, _ in views]
    # Views that no group has make a run, too, so that the run before ends where they begin.
    edges = [n for n in range(len(views)) if n == 0 or groups[n] is not groups[n - 1]]
    for first, last in zip(edges, [*edges[1:], len(views)], strict=True):
        group = groups[first]
        start = views[first][1]
        stop = numel if last == len(views) else views[last][1]
        # Also without elements on this rank: norms of those on other ranks are collective.
        if group is not None:
            yield views[first][0], Joined(viewed, group, first, last, start, stop)


def step_count(value: Tensor | float, parameter: Tensor) -> Tensor:
    """Copy of a step count on the parameter's device: FP32, 0-dim."""
    if isinstance(value, Tensor):
        return value.detach().to(parameter.device, torch.float32, copy=True)
    return torch.full((), value, dtype=torch.float32, device=parameter.device)


def grad_of(parameter: Tensor) -> Tensor | None:
    """Gradient of a parameter: `.main_grad` if an engine or a fused wgrad accumulates there, else `.grad`."""
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
