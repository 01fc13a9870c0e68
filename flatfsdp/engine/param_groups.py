"""Optimizer settings per parameter over flat buffers; the targets that an optimizer may write besides.

In:   a model, and which parameters get which options.
Out:  parameter groups for torch.optim, whose parameters are local shards: pieces of the flat ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.flat_shard import FLAT_SHARD, VIEWED_SHARD, FlatShard, JointGrad, Moved
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.master import MasterShard, Portion
from flatfsdp.engine.units import Model, named_groups

Selection = Callable[[str, tuple[int, ...]], bool] | Iterable[str]
"""Selected parameters: a predicate of (name, shape), or names of the state dict."""


def param_groups(model: Model, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups for any element-wise torch.optim optimizer.

    The optimizer's parameters are *local shards*, pieces of the flat ones, one for each run of neighbouring
    parameters with the same options.  From now on gradients come to them, not to the flat parameters, so
    build one optimizer per model, of these groups, and step it only after the last backward of a step.

        no_decay = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW(param_groups(model, [no_decay]), lr=3e-4)

    A model that is sharded in place has one local shard for each parameter already (`parameters()`): those
    are returned, and nothing is cut.

    Args:
        model: a FlatFSDP module, or one that contains some, or the stages of a pipeline that this rank has.
            Collective when it is first used.
        groups: options of torch.optim, and "params": a predicate of (name, shape) or a collection of names.
            A parameter belongs to the first group that selects it.  A tied parameter goes by its first name,
            and one that is split over tensor-parallel ranks by the shape of the whole.

    Returns:
        One group for each of `groups`, and a last one without options for parameters that none has selected,
        if there are any.  A group has nothing but empty local shards on ranks whose shards hold none of it.

    Raises:
        ValueError: if a group lacks "params", names a parameter that is not trained here, or selects none; if
            there are gradients.
    """
    groups_of_model = [(prefix, group) for prefix, group in named_groups(model) if group.trains]
    shapes = {
        prefix + slot.name: slot.whole_shape
        for prefix, group in groups_of_model
        for slot, trains in zip(group.layout.slots, group.flags, strict=True)
        if trains
    }
    chosen = _choose(shapes, [_selected(group, shapes) for group in groups])
    to_cut = [group for _, group in groups_of_model if not group.master.has_views]
    if any(group.master.marks.is_on or group.master.grads for group in to_cut):
        raise ValueError("there are gradients already; call zero_grad() before param_groups")
    masters = [group.master for group in to_cut]
    if any(master.is_cut for master in masters):
        raise ValueError("param_groups has cut this model's shards already; build one optimizer of them")
    parameters: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for prefix, flat_group in groups_of_model:
        master = flat_group.master
        names = [prefix + slot.name for slot in master.layout.slots]
        if master.has_views:
            for name, portion in zip(names, master.portions, strict=True):
                if name in chosen:
                    parameters[chosen[name]].append(portion.parameter)
            continue
        cut = list(_cut(master, [chosen[name] for name in names]))
        master.divide([portion for _, portion in cut])
        for index, portion in cut:
            parameters[index].append(portion.parameter)
        attach_targets(flat_group)
    options = [*groups, {}]
    used = [*range(len(groups)), *([len(groups)] if len(groups) in chosen.values() else [])]
    return [{**options[index], "params": parameters[index]} for index in used]


def _selected(group: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> set[str]:
    if "params" not in group:
        raise ValueError(f'parameter group {group} has no "params"; pass a predicate or names')
    selection: Selection = group["params"]
    if isinstance(selection, str):
        raise ValueError(f'"params" is the string {selection!r}; pass a collection of names or a predicate')
    if callable(selection):
        names = {name for name, shape in shapes.items() if selection(name, shape)}
    else:
        names = set(selection)
        if not all(isinstance(name, str) for name in names):
            raise ValueError('"params" holds something else than names, perhaps parameters; pass their names')
    there_are = f"there are {', '.join(list(shapes)[:3])}, ..."
    unknown = sorted(names - set(shapes))
    if unknown:
        raise ValueError(
            f"a parameter group names {unknown[0]!r}, which is not a trained parameter of this model; "
            f"{there_are}"
        )
    if not names:
        raise ValueError(f"parameter group {group} selects no parameter; {there_are}")
    return names


def _choose(shapes: Iterable[str], selections: Sequence[set[str]]) -> dict[str, int]:
    """Maps each name to the index of the first selection that has it, or to the number of selections."""
    return {
        name: next((i for i, names in enumerate(selections) if name in names), len(selections))
        for name in shapes
    }


def _cut(master: MasterShard, indices: Sequence[int]) -> Iterable[tuple[int, Portion]]:
    """This rank's portions: runs of slots with the same index, each up to where the next run begins."""
    slots, length = master.layout.slots, master.flat.numel()
    first = master.grid.shard.rank * length
    starts = [n for n, index in enumerate(indices) if n == 0 or index != indices[n - 1]]
    ends = [slots[n].offset for n in starts[1:]] + [master.layout.padded_numel(master.grid.shard.size)]
    for n, end in zip(starts, ends, strict=True):
        start, stop = (min(max(edge - first, 0), length) for edge in (slots[n].offset, end))
        if start < stop:
            # Detached tensors share the version counter, so an update is noticed.
            yield indices[n], Portion(nn.Parameter(master.flat.detach()[start:stop]), start, stop)


def attach_targets(group: FlatGroup) -> None:
    """Gives `flat_shard` and `viewed_shard` to the parameters of this group that an optimizer has."""
    viewed = GroupViews(group) if group.master.has_views else None
    for parameter, start, stop in group.master.portions:
        FLAT_SHARD.leave(parameter, PortionTarget(group, start, stop))
        if viewed is not None:
            VIEWED_SHARD.leave(parameter, viewed)


def gradients_of(model: Model) -> list[tuple[FlatShard, Sequence[Tensor]]]:
    """All flat shards of `model` that are trained, each with the reduced gradients that it has now.

    Raises:
        RuntimeError: if there are none, and accumulated ones wait to be reduced.
    """
    groups = [group for _, group in named_groups(model) if group.main_grad is not None]
    unreduced = next((group.name for group in groups if group.master.marks.is_on), None)
    if unreduced is not None and not any(group.master.grads for group in groups):
        raise RuntimeError(
            f"gradients of unit {unreduced} are accumulated and not yet reduced, and a norm would be without "
            "them; take it after the last backward of the step, outside of no_sync()"
        )
    return [(PortionTarget(group, 0, group.master.flat.numel()), group.master.grads) for group in groups]


def uncut_shapes(parameter: Tensor) -> list[tuple[int, ...]]:
    """Whole shapes of the parameters of which an optimizer has this rank's part, on all ranks alike.

    For parameters that `parameters()` lists; empty for a portion that `param_groups` has cut.
    """
    shape, target = WHOLE_SHAPE.of(parameter), FLAT_SHARD.of(parameter)
    if shape is not None:
        return [shape]
    return target.uncut_shapes(parameter) if isinstance(target, PortionTarget) else []


class PortionTarget:
    """Elements [start, stop) of one group's master shard, as a `FlatShard`.

    Attributes:
        group: the group.
    """

    def __init__(self, group: FlatGroup, start: int, stop: int) -> None:
        self.group = group
        self._start, self._stop = start, stop

    @property
    def grid(self) -> Grid:
        """The ranks over which the buffer is sharded, replicated and split."""
        return self.group.grid

    @property
    def stages(self) -> Ranks:
        """The ranks of the pipeline; without one, alone."""
        return self.group.master.stages

    def identify(self, action: Action) -> Identity | None:
        """What a collective for this parameter carries."""
        return self.group.unit.identify(action)

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the gradient in a norm: of ranks that have the same one, one does."""
        return self.group.master.is_counted

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.group.master.device

    @property
    def moved(self) -> Moved | None:
        """What a step has changed of the model besides gradients; see `FlatShard`."""
        return self.group.unit.shared.scales if self.group.unit.is_used else None

    @property
    def awaits_gradients(self) -> bool:
        """Whether no gradient has landed since the model's last training forward."""
        return self.group.unit.shared.microbatch.awaits_gradients

    @property
    def rounding(self) -> torch.dtype:
        """The dtype of `compute`, to which values are rounded before an amax is taken."""
        return self.group.unit.policy.precision.compute

    @property
    def compute(self) -> Tensor | None:
        """The compute shard that an optimizer may write; None if there is none of its own."""
        shard = self.group.compute_shard.for_optimizer
        return None if shard is None else shard[self._start : self._stop]

    def runs(self) -> list[tuple[int, int, Tensor]]:
        """Runs of elements whose amax is wanted, each with the tensor to put it in; see `FlatShard`."""
        # A weight is in one portion: those are cut between weights.
        return self.group.compute_shard.amaxes_of(self._start, self._stop)

    def uncut_shapes(self, parameter: Tensor) -> list[tuple[int, ...]]:
        """Whole shapes of the parameters in the group, if `parameter` is its shard."""
        master = self.group.master
        return [slot.whole_shape for slot in master.layout.slots] if parameter is master.flat else []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as nothing: a copy of the parameter is an ordinary one."""
        return _no_target, ()

    def cast_done(self) -> None:
        """Notes that the parameter, `compute` and the amaxes have been written from the same values."""
        if not self.group.master.is_offloaded:
            self.group.compute_shard.portion_done(self._start, self._stop)


class GroupViews:
    """The master shard of a group that is sharded in place, as a `ViewedShard`."""

    def __init__(self, group: FlatGroup) -> None:
        self._group = group

    @property
    def model(self) -> object:
        """The same object for all shards of a model; None before the model is used."""
        return self._group.master.in_model.answers

    @property
    def number(self) -> int:
        """Number of the shard in its model; 0 before the model is used."""
        return self._group.master.in_model.number

    @property
    def flat(self) -> Tensor:
        """The whole master shard."""
        return self._group.master.flat

    @property
    def views(self) -> Sequence[tuple[Tensor, int, int]]:
        """Views of the master shard, each with its start and stop in the shard."""
        return self._group.master.portions

    def joint_grad(self, first: int, last: int) -> JointGrad | None:
        """The gradient of consecutive views together; None if they do not share one."""
        return self._group.master.joint_grad(first, last)

    def joined(self, start: int, stop: int) -> FlatShard:
        """The target of consecutive views together."""
        return PortionTarget(self._group, start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles it as a `PortionTarget`."""
        return _no_target, ()


def _no_target() -> None:
    return None
