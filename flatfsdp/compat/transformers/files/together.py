"""Ranks that share a model do one thing together, and all learn what goes wrong on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.storage.master import require_same_ranks
from flatfsdp.engine.units import UnitState, named_groups, units_in


def begin_together(model: nn.Module, doing: str) -> tuple[UnitState, list[FlatGroup]]:
    """Waits until all ranks that share the model are about to do this.  Collective.

    Returns:
        The state of the model's outermost unit, and all groups.

    Raises:
        ValueError: if nothing is sharded, some units are spread over fewer ranks than others, or ranks have
            parts of the same parameters (tensor parallelism).
        RuntimeError: if a rank does not come, or parameters are whole now.
    """
    states = [unit.fsdp_state for _, unit in units_in(model)]
    if not states:
        raise ValueError(f"{type(model).__name__} is not sharded; {doing} is for models that are")
    state = states[0]
    for ranks in state.grid.dimensions:
        meet(ranks, doing)
    if any(each.is_whole for each in states):
        raise RuntimeError(f"{doing} inside summon_full_params(): call it outside of the block")
    if state.grid.tensor.size > 1:
        raise ValueError(f"{doing} of a tensor-parallel model is not supported; use flatfsdp.checkpoint")
    groups = [group for _, group in named_groups(model)]
    require_same_ranks((group.master for group in groups), doing)
    settle(groups)
    return state, groups


@contextmanager
def raising_together(state: UnitState) -> Iterator[None]:
    """Raises on every rank that shares the model what is raised inside on one of them.  Collective.

    What is raised on several is each one's own.
    """
    told: Exception | None = None
    try:
        yield
    except Exception as error:
        told = error
    everywhere: Exception | None = told
    for ranks in state.grid.dimensions:
        others = all_gather_object(everywhere, ranks, state.device)
        everywhere = everywhere or next((each for each in others if each is not None), None)
    if everywhere is not None:
        raise everywhere
