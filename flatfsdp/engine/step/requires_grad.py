"""Follows `requires_grad`, which a user may change at any time, of a module or of a single parameter.

In:   the flags of the parameters that modules list, and of what modules show.
Out:  both, the optimizer's parameters, and the graphs of coming forwards have the flags that changed.
Next: `driven_unit.py` waits for gradients of the slots that are trained; `reduce.py` reduces their groups.

    at the forward    at the backward    gradients
    trained           trained            land, and are reduced
    trained           frozen             none, as PyTorch's: a leaf that is frozen accumulates nothing
    frozen            either             none: the graph does not lead to the parameter

Each slot of a group may be trained or frozen by itself; those of one flat parameter (fairscale's class) are
frozen together.  A group takes part in a step's reduction, on all ranks, from the step's first backward that
reaches a forward in which some slot was trained, if one still is.  That depends on flags only, which are the
same on all ranks, not on what has landed here.  For other groups nothing is allocated, launched or published.
"""

from __future__ import annotations

from flatfsdp.engine.storage.group import REQUIRES_GRAD, FlatGroup


def follow_requires_grad(group: FlatGroup) -> None:
    """Trains or freezes what a user has changed; runs in each forward, and usually finds nothing changed.

    Raises:
        RuntimeError: if weights that were built frozen and stored in FP8 are to be trained; if only some of
            the parameters in one flat parameter were changed.
    """
    known = group.params.trained
    shown = list(map(REQUIRES_GRAD, group.params.shown_now))
    listed = group.flags
    if shown == known and listed == known:
        return
    # Whichever of the two was changed.
    wanted = [a if a != b else c for a, b, c in zip(listed, known, shown, strict=True)]
    if not group.master.is_divided and len(set(wanted)) > 1:
        changed = [trains != before for trains, before in zip(wanted, known, strict=True)].index(True)
        raise RuntimeError(
            f"requires_grad of parameter {group.unit.prefix}{group.layout.slots[changed].name} was set to "
            f"{wanted[changed]} by itself, and a flat parameter is frozen as a whole: call requires_grad_() "
            "of the wrapped module, make it a unit of its own, or shard the model with flatfsdp.shard"
        )
    if any(wanted) and group.main_grad is None:
        if group.compute_shard.is_cast_once_a_load:
            raise RuntimeError(
                f"unit {group.name} was sharded with frozen weights that it stores in FP8 and casts once a "
                "load; to train them, shard first and freeze then, or leave out Precision(fp8_weights=...)"
            )
        # It is trained for the first time; what is built frozen has no memory for gradients.
        group.open_main_grad()
    group.train(wanted)
