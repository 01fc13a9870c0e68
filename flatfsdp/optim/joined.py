"""Joins views of one shard that an optimizer can update in one run of its kernel.

In:   parameter groups with views (`ViewedShard` of `contract/flat_shard.py`).
Out:  `Updated`: unit of update: an ordinary parameter, or several views together.
Next: `fused.py` iterates over these instead of over parameters.

    shard    | view 0 .......|gap| view 1 ....................|gap| view 2 .....|
    groups     decay               no decay                         no decay
    updated  [0 ................) [1 and 2 ...................................)

Neighbouring views of one parameter group are joined, from where the first one starts to where the next run
starts.  These are the portions that `param_groups` cuts, so norms are summed in the same order.  Joined views
share one state tensor, of which each has its part under its own name in the optimizer's state, and one step
count.

They are parted if only some of them have a gradient: each then continues with its part of the state and a
count of its own.  Loading a state joins them again, if their counts are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from flatfsdp.contract.flat_shard import FLAT_SHARD, VIEWED_SHARD, FlatShard, ViewedShard

STEP = "step"
"""Key of the state that counts updates of a parameter, as in `torch.optim.AdamW`."""

State = MutableMapping[Tensor, dict[str, Any]]
"""The optimizer's `state`, by parameter."""


class Updated:
    """Unit of update, which takes one run of the kernel: here a single parameter.

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
    def model(self) -> object:
        """Identity of the model, if these are views of its shard; None for anything else."""
        return None

    @property
    def number(self) -> int:
        """Number of the shard in its model if there are views of it; 0 for anything else."""
        return 0

    def state(self, states: State) -> dict[str, Any]:
        """The optimizer's state for it, to be read and written; empty at first."""
        return states[self.parameter]

    def count(self, states: State) -> Tensor | None:
        """Number of steps it has had, 0-dim; None if that is not counted."""
        step: Tensor | None = states.get(self.parameter, {}).get(STEP)
        return step

    def hand_out(self, states: State) -> None:
        """Gives the parameters what `state` has got since."""


class Joined(Updated):
    """Unit of update of neighbouring views [first, last) of one shard.

    Args:
        start: first element of the shard that they cover.
        stop: end of these elements, with the gaps between the views.
    """

    def __init__(
        self, viewed: ViewedShard, group: dict[str, Any], first: int, last: int, start: int, stop: int
    ) -> None:
        super().__init__(viewed.flat.detach()[start:stop], group, viewed.joined(start, stop))
        self._viewed = viewed
        self._first, self._last = first, last
        self._start, self._stop = start, stop
        self._own: dict[str, Any] = {}
        self._handed_out: list[tuple[Tensor, dict[str, Any]]] = []

    @property
    def views(self) -> Sequence[tuple[Tensor, int, int]]:
        """The views as (parameter, start, stop): elements [start, stop) of `parameter`."""
        views = self._viewed.views[self._first : self._last]
        return [(view, start - self._start, stop - self._start) for view, start, stop in views]

    @property
    def model(self) -> object:
        """The same object for all shards of a model."""
        return self._viewed.model

    @property
    def number(self) -> int:
        """Number of the shard in its model."""
        return self._viewed.number

    @property
    def grad(self) -> Tensor | None:
        """The gradient of all views together, as long as `parameter`; None if they do not share one."""
        joint = self._viewed.joint_grad(self._first, self._last)
        return None if joint is None else joint[self._start : self._stop]

    def state(self, states: State) -> dict[str, Any]:
        """The optimizer's state of all views together."""
        return self._own

    def count(self, states: State) -> Tensor | None:
        """The number of steps that the state has seen."""
        return self._own.get(STEP)

    def hand_out(self, states: State) -> None:
        """Gives each view its part of the state, as state dicts have it."""
        if len(self._own) == (len(self._handed_out[0][1]) if self._handed_out else 0):
            return
        self._handed_out = []
        for view, start, stop in self.views:
            if start < stop:
                parts = {key: value if key == STEP else value[start:stop] for key, value in self._own.items()}
                states[view] = dict(parts)
                self._handed_out.append((view, parts))

    def has_its_state(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the optimizer's state is still the one that was handed out."""
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
        own = [(states.get(view) or {}, start, stop) for view, start, stop in self.views if start < stop]
        own = [({k: v for k, v in state.items() if v is not None}, a, b) for state, a, b in own]
        if not any(state for state, _, _ in own):
            return True
        first = own[0][0]
        if any(state.keys() != first.keys() for state, _, _ in own):
            return False
        for key, value in first.items():
            found = [state[key] for state, _, _ in own]
            if not all(isinstance(each, Tensor) and each.dtype == value.dtype for each in found):
                return False
            if key == STEP:
                if len(set(torch.stack([each.reshape(()) for each in found]).tolist())) > 1:
                    return False
            elif any(
                each.shape != (stop - start,) for each, (_, start, stop) in zip(found, own, strict=True)
            ):
                return False
        for key, value in first.items():
            if key == STEP:
                self._own[key] = value.clone()
                continue
            self._own[key] = torch.zeros_like(self.parameter, dtype=value.dtype, device=value.device)
            for state, start, stop in own:
                self._own[key][start:stop] = state[key]
        self.hand_out(states)
        return True

    def parted(self, states: State) -> list[Updated]:
        """The non-empty views one by one, each with its part of the state and its own count."""
        parted = [Updated(view, self.group, FLAT_SHARD.of(view)) for view, a, b in self.views if a < b]
        for each in parted:
            state = states.get(each.parameter, {})
            if STEP in state:
                state[STEP] = state[STEP].clone()
        return parted


def updated(param_groups: Sequence[dict[str, Any]], states: State) -> list[Updated]:
    """Lists all units of update in the order of the parameters; joined views come at their first one."""
    group_of = {p: group for group in param_groups for p in group["params"] if VIEWED_SHARD.of(p) is not None}
    joined = {
        each.views[0][0]: each
        for viewed in dict.fromkeys(VIEWED_SHARD.of(view) for view in group_of)
        if viewed is not None
        for each in _runs(viewed, group_of)
    }
    found: list[Updated] = []
    for group in param_groups:
        for parameter in group["params"]:
            if parameter not in group_of:
                found.append(Updated(parameter, group, FLAT_SHARD.of(parameter)))
            elif parameter in joined:
                together = joined[parameter]
                found += [together] if together.take_over(states) else together.parted(states)
    return found


def _runs(viewed: ViewedShard, group_of: Mapping[Tensor, dict[str, Any]]) -> Iterator[Joined]:
    """Yields runs of neighbouring views of one group, as `param_groups` cuts portions."""
    views, numel = viewed.views, viewed.flat.numel()
    groups = [group_of.get(view) for view, _, _ in views]
    edges = [n for n in range(len(views)) if n == 0 or groups[n] is not groups[n - 1]]
    for first, last in zip(edges, [*edges[1:], len(views)], strict=True):
        group = groups[first]
        start = views[first][1]
        stop = numel if last == len(views) else views[last][1]
        if group is not None and start < stop:
            yield Joined(viewed, group, first, last, start, stop)
