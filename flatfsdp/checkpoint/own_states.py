"""States that each data-parallel rank has of its own, such as the position of its data loader.

In:   the state dict of this rank's object.
Out:  one value for `extra` with the states of all ranks; and this rank's part of it again.
"""

from __future__ import annotations

from typing import Any

from flatfsdp.checkpoint.stages import world_of
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.engine.whole.units import Model, named_groups

_STATES = "states of data-parallel ranks"


def of_each_rank(state: Any, model: Model) -> dict[str, Any]:
    """Gathers what each data-parallel rank has of its own, for `extra`.  Collective over all ranks.

        extra = {"loader": checkpoint.of_each_rank(loader.state_dict(), model)}
        manager.save(step, model, optimizer, extra)
        ...
        found = manager.resume(model, optimizer)
        loader.load_state_dict(checkpoint.of_this_rank(found.extra["loader"], model))

    What all ranks have alike needs no such thing: `extra` is the first rank's.  Ranks that share a sequence,
    by tensor or pipeline parallelism, are one data-parallel rank, and the first of them is asked.

    Args:
        state: tensors, numbers, strings, and lists and dicts of them: the state dict of a data loader, say.
        model: the model, or this rank's stages of a pipeline.

    Returns:
        The states of all data-parallel ranks, on every rank.
    """
    rank, size = _place(model)
    states: list[Any] = [None] * size
    # The first rank of several with the same data comes last, and stays.
    for place, theirs in reversed(all_gather_object((rank, state), *world_of(model))):
        states[place] = theirs
    return {_STATES: states}


def of_this_rank(saved: Any, model: Model) -> Any:
    """This data-parallel rank's part of what `of_each_rank` has returned when it was saved.

    Args:
        saved: the value that `extra` had.
        model: the model, or this rank's stages of a pipeline.

    Raises:
        TypeError: if `saved` is anything else.
        ValueError: if it is of another number of data-parallel ranks, on all of them.
    """
    rank, size = _place(model)
    if not isinstance(saved, dict) or saved.keys() != {_STATES}:
        raise TypeError(f"of_this_rank was given a {type(saved).__name__}; pass what of_each_rank returned")
    states: list[Any] = saved[_STATES]
    if len(states) != size:
        raise ValueError(
            f"{len(states)} data-parallel ranks saved a state each, and now there are {size}, whose data are "
            "others: go on with as many ranks, or save one position that counts the samples of all ranks"
        )
    return states[rank]


def _place(model: Model) -> tuple[int, int]:
    """Number of this data-parallel rank, and how many there are."""
    # Units inside may be spread over fewer ranks.
    grid = max((group.grid for _, group in named_groups(model)), key=lambda grid: grid.num_ranks)
    return grid.replicate.rank * grid.shard.size + grid.shard.rank, grid.num_ranks
