"""Exchanges between the stages of a model about the sharded checkpoint that they share.

In:   a model, or the stages of a pipeline that this rank has.
Out:  names and problems of all stages, the same on every rank.
Next: `saving.py`, `loading.py` and `fit.py` ask before they write, read or change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatfsdp.checkpoint.errors import CheckpointError, reason
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import declare
from flatfsdp.comm.grid import require_same_ranks
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.engine.whole.units import Model, named_groups


def world_of(model: Model) -> tuple[Ranks, torch.device]:
    """All ranks, and the device they communicate on."""
    return Ranks.of(default_group()), named_groups(model)[0][1].master.device


def begin(model: Model, action: Action) -> None:
    """Begins a save or a load on all ranks.  Collective over all ranks.

    Raises:
        RuntimeError: if some rank does something else, or does not come.
    """
    world, device = world_of(model)
    first = named_groups(model)[0][1]
    if first.unit.policy.debug.check_collectives:
        # Stages of a pipeline are models of their own, with numbers of their own.
        whole = ModelIdentity(timeout=first.unit.policy.timeout)
        declare(
            world, Identity(action, whole, is_early=first.unit.shared.microbatch.steps_reduced == 0), device
        )


def of_each_stage(value: Any, model: Model) -> list[Any]:
    """Gathers the picklable value of each stage's first rank.  Collective over all ranks."""
    is_first = named_groups(model)[0][1].master.grid.is_first
    world, device = world_of(model)
    everyones = all_gather_object([value] if is_first else [], world, device)
    return [each for of_rank in everyones for each in of_rank]


def lanes_of(model: Model) -> Lanes | None:
    """The lanes that the model was built with.  Collective over all ranks.

    Raises:
        ValueError: on every rank, if stages have different lanes.
    """
    first, *others = of_each_stage(named_groups(model)[0][1].unit.policy.lanes, model)
    for other in others:
        if other != first:
            raise ValueError(
                f"stages have different lanes, {first} and {other}; pass the same to all of them"
            )
    return first


def check_names(model: Model, action: Action) -> set[str]:
    """Gathers the names of all stages' parameters.  Collective over all ranks.

    Args:
        model: the model, or this rank's stages of a pipeline.
        action: save or load, for the check against other ranks.

    Raises:
        ValueError: if two stages have the same name, as one of the two would be lost.
    """
    groups = named_groups(model)
    begin(model, action)
    require_same_ranks((group.grid for _, group in groups), "a sharded checkpoint")
    own = [prefix + slot.name for prefix, group in groups for slot in group.layout.slots]
    names = Counter(name for of_stage in of_each_stage(own, model) for name in of_stage)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"two stages have a parameter {twice[0]!r}; give layers the same names as in the whole model, "
            "such as keys of an nn.ModuleDict by the number of the layer"
        )
    return set(names)


@contextmanager
def raising_on_all(model: Model) -> Iterator[None]:
    """Context that raises the lowest rank's exception on every rank.  Collective over all ranks.

    Collectives inside must raise on all their ranks alike: others would wait there.
    """
    world, device = world_of(model)
    told: Exception | None = None
    try:
        yield
    except (ValueError, TypeError, CheckpointError) as error:
        told = error
    except Exception as error:
        told = CheckpointError(f"rank {world.rank}: {reason(error)}")
    for theirs in all_gather_object(told, world, device):
        if theirs is not None:
            raise theirs
