"""Finds the groups that are trained: their flat parameters require gradients now.

In:   `requires_grad` of flat parameters, which a user may change at any time (`module.requires_grad_()`).
Out:  what the modules see follows that, at each forward and at the beginning of each backward.
Next: `unit.py` waits for the gradients of the groups that take part; `reduce.py` reduces those.

    at the forward    at the backward    gradients
    trained           trained            land, and are reduced
    trained           frozen             none, as PyTorch's: a leaf that is frozen accumulates nothing
    frozen            either             none: the graph does not lead to the parameters

A group takes part in a step's reduction, on all ranks, from the step's first backward that reaches a forward
in which the group was trained, if it still is.  That depends on flags only, which are the same on all ranks,
not on what has landed here.  For other groups nothing is allocated, launched or published.
"""

from __future__ import annotations

from operator import attrgetter

from flatfsdp.engine.storage.group import FlatGroup

_REQUIRES_GRAD = attrgetter("requires_grad")


def follow_one_flag(group: FlatGroup) -> None:
    """Does what the two functions below do; usually no flag has changed, which takes less time to find out.

    Raises:
        RuntimeError: if the group cannot be trained, or only some of its parameters were changed.
    """
    params = group.params
    flagged = (*group.flagged, *group.master.parameters, *params.shown_now)
    if set(map(_REQUIRES_GRAD, flagged)) != {params.trains}:
        follow_requires_grad(group)
        require_one_flag(group)


def follow_requires_grad(group: FlatGroup) -> None:
    """Trains or freezes the module's parameters, as the flat parameter says.

    Raises:
        RuntimeError: if the group cannot be trained, or only some of its parameters were changed.
    """
    trains = group.trains
    mixed = list(map(_REQUIRES_GRAD, group.flagged))
    if len(set(mixed)) > 1:
        slot = group.layout.slots[mixed.index(not trains)]
        raise RuntimeError(
            f"requires_grad of parameter {group.prefix}{slot.name} was set to {not trains}, and not that of "
            f"{group.prefix}{group.layout.slots[0].name}; the parameters of a unit are frozen together: set "
            "all of them, or shard what is to be frozen by itself as a unit of its own"
        )
    if trains == group.params.trains:
        return
    if trains and group.main_grad is None:
        if group.fp8 is not None:
            raise RuntimeError(
                f"unit {group.name} was sharded with frozen weights that it stores in FP8.  They are cast "
                "once a load, so they cannot be trained; call requires_grad_(True) before the model is "
                "sharded, and requires_grad_(False) after it, or leave out Precision(fp8_weights=...)"
            )
        group.open_main_grad()
    group.params.follow(trains)
    for parameter in (group.master.flat, *group.master.parameters):
        parameter.requires_grad_(trains)


def require_one_flag(group: FlatGroup) -> None:
    """Checks that no parameter of a group has been frozen or unfrozen by itself since `follow_requires_grad`.

    Raises:
        RuntimeError: if one has; its gradient is a part of the whole group's.
    """
    trains = group.params.trains
    way_out = (
        "the parameters of a unit are frozen together; call requires_grad_() of the sharded module, or of "
        "all that it lists, and make what is to be frozen by itself a unit of its own"
    )
    if (name := group.params.deviating) is not None:
        raise RuntimeError(
            f"requires_grad of parameter {group.prefix}{name} was set to {not trains} by itself; {way_out}"
        )
    if any(parameter.requires_grad != trains for parameter in group.master.parameters):
        raise RuntimeError(
            f"requires_grad of an optimizer's portion of unit {group.name} was set to {not trains} by "
            f"itself; {way_out}"
        )
