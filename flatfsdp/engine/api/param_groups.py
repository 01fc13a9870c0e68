"""Optimizer settings per parameter over flat buffers; the targets that an optimizer may write besides.

In:   a model, and which parameters get which options.
Out:  parameter groups for torch.optim, whose parameters are local shards: pieces of the flat ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.flat_shard import FlatShard
from flatfsdp.engine.storage.master import MasterShard, Portion
from flatfsdp.engine.storage.targets import PortionTarget, attach_targets
from flatfsdp.engine.storage.views import portion_of
from flatfsdp.engine.whole.units import Model, named_groups

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
    chosen: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in _selected(group, shapes):
            chosen.setdefault(name, index)
    rest = len(groups)
    masters = [group.master for _, group in groups_of_model if not group.master.has_views]
    # They are at the flat parameters, of which no optimizer will know.
    if any(master.marks.is_on or master.grads for master in masters):
        raise ValueError("there are gradients already; call zero_grad() before param_groups")
    if any(master.is_cut for master in masters):
        raise ValueError("param_groups has cut this model's shards already; build one optimizer of them")
    parameters: list[list[nn.Parameter]] = [[] for _ in range(rest + 1)]
    for prefix, flat_group in groups_of_model:
        master = flat_group.master
        names = [prefix + slot.name for slot in master.layout.slots]
        indices = [chosen.get(name, rest) for name in names]
        if master.has_views:
            of_slots = zip(names, indices, master.portions, strict=True)
            cut = [(index, portion) for name, index, portion in of_slots if name in shapes]
        else:
            cut = list(_cut(master, indices))
            master.divide([portion for _, portion in cut])
            # The new parameters are what an optimizer has.
            attach_targets(flat_group)
        for index, portion in cut:
            parameters[index].append(portion.parameter)
    # Of the names, not of this rank's parameters: all ranks have equally many groups, for checkpoints.
    used = [*groups, {}] if len(chosen) < len(shapes) else groups
    return [{**options, "params": of_group} for options, of_group in zip(used, parameters, strict=False)]


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


def _cut(master: MasterShard, indices: Sequence[int]) -> Iterable[tuple[int, Portion]]:
    """This rank's portions: runs of slots with the same index, each up to where the next run begins."""
    slots = master.layout.slots
    starts = [n for n, index in enumerate(indices) if n == 0 or index != indices[n - 1]]
    ends = [slots[n].offset for n in starts[1:]] + [master.layout.padded_numel(master.grid.shard.size)]
    for n, end in zip(starts, ends, strict=True):
        portion = portion_of(master, slots[n].offset, end)
        if portion.start < portion.stop:
            yield indices[n], portion


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
