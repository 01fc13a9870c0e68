"""Collective begin of an operation on a model, and errors of one rank raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from flatfsdp.comm.grid import require_same_ranks
from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.whole.units import UnitModule, named_groups, units_in


def begin_together(model: nn.Module, doing: str) -> tuple[Unit, list[FlatGroup]]:
    """Waits until all ranks that share the model are about to do this.  Collective.

    Args:
        model: a unit.
        doing: name of the operation, for messages.

    Returns:
        The state of the model's outermost unit, and all groups.

    Raises:
        ValueError: if the model is not a unit, some units are spread over fewer ranks than others, or the
            model is tensor parallel.
        RuntimeError: if a rank does not arrive, or parameters are currently whole.
    """
    outermost = unwrapped(model)
    if not isinstance(outermost, UnitModule):
        raise ValueError(
            f"{type(model).__name__} is not sharded as a whole; pass {doing} what flatfsdp.shard or "
            "auto_wrap has returned"
        )
    state = outermost.fsdp_state
    for ranks in state.grid.dimensions:
        meet(ranks, doing, state.policy.timeout)
    if any(unit.fsdp_state.is_whole for _, unit in units_in(model)):
        raise RuntimeError(f"{doing} inside summon_full_params(): call it outside of the block")
    if state.grid.tensor.size > 1:
        raise ValueError(f"{doing} of a tensor-parallel model is not supported; use flatfsdp.checkpoint")
    groups = [group for _, group in named_groups(model)]
    require_same_ranks((group.grid for group in groups), doing)
    settle(groups)
    return state, groups


@contextmanager
def raising_together(state: Unit) -> Iterator[None]:
    """Raises an error of one rank on every rank that shares the model.  Collective.

    If several ranks fail, each raises its own error.
    """
    told: Exception | None = None
    try:
        yield
    except Exception as error:
        told = _as_it_travels(error)
    for ranks in state.grid.dimensions:
        others = all_gather_object(told, ranks, state.shared.device)
        told = told or next((each for each in others if each is not None), None)
    if told is not None:
        raise told


def _as_it_travels(error: Exception) -> Exception:
    """The error itself, or one with the same message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
