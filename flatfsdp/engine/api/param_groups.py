"""`param_groups`: optimizer settings per parameter, by its name and its whole shape.

In:   a model, and which parameters get which options.
Out:  parameter groups for torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from flatfsdp.engine.whole.units import Model, named_groups

Selection = Callable[[str, tuple[int, ...]], bool] | Iterable[str]
"""Selected parameters: a predicate of (name, shape), or names of the state dict."""


def param_groups(model: Model, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups for any element-wise torch.optim optimizer.

    The shape of a local shard tells nothing of its parameter's, so that optimizers' usual rules (no weight
    decay for what is 1-D) need the names and shapes of the whole parameters.

        no_decay = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW(param_groups(model, [no_decay]), lr=3e-4)

    Args:
        model: a sharded model, or one that contains some, or the stages of a pipeline that this rank has.
            Collective when it is first used.
        groups: options of torch.optim, and "params": a predicate of (name, shape) or a collection of names.
            A parameter belongs to the first group that selects it.  A tied parameter goes by its first name,
            and one that is split over tensor-parallel ranks by the shape of the whole.

    Returns:
        One group for each of `groups`, and a last one without options for parameters that none has selected,
        if there are any.  A group has nothing but empty local shards on ranks whose shards hold none of it.

    Raises:
        ValueError: if a group lacks "params", names a parameter that is not trained here, or selects none; if
            the model lists flat parameters, as fairscale's class does.
    """
    left: dict[str, nn.Parameter] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, flat_group in named_groups(model):
        if not flat_group.master.is_divided:
            raise ValueError(
                f"unit {flat_group.name} lists one flat parameter, which cannot have options for a part of "
                "it; shard the model with flatfsdp.shard, or wrap it with flatfsdp.FlatFSDP"
            )
        for slot, parameter in zip(flat_group.layout.slots, flat_group.master.parameters, strict=True):
            if parameter.requires_grad:
                left[prefix + slot.name], shapes[prefix + slot.name] = parameter, slot.whole_shape
    made = []
    for group in groups:
        names = _selected(group, shapes)
        made.append({**group, "params": [left.pop(name) for name in list(left) if name in names]})
    # By names, not by this rank's elements: all ranks have equally many groups, for checkpoints.
    return [*made, {"params": list(left.values())}] if left else made


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
    if unknown := sorted(names - shapes.keys()):
        raise ValueError(f"a group names {unknown[0]!r}, which is not a trained parameter; {there_are}")
    if not names:
        raise ValueError(f"parameter group {group} selects no parameter; {there_are}")
    return names
