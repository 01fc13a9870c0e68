"""Shows a unit's parameters as ordinary ones for a while: whole, in master precision, in the module.

In:   the flat groups of one unit.
Out:  inside `whole_parameters`, what `summon_full_params` and `state_dict` show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from flatfsdp.comm.objects import broadcast_object
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.storage.master import require_same_ranks
from flatfsdp.policy import Gathering

_of_state_dicts: ContextVar[Gathering | None] = ContextVar("flatfsdp_state_dict_gathering", default=None)


def state_dict_gathering() -> Gathering:
    """The ranks that get the parameters in a `state_dict()` that is called now."""
    return _of_state_dicts.get() or Gathering()


@contextmanager
def state_dicts_gathered(gathering: Gathering) -> Iterator[None]:
    """Context in which `state_dict()`, called by this thread, gathers to these ranks."""
    token = _of_state_dicts.set(gathering)
    try:
        yield
    finally:
        _of_state_dicts.reset(token)


@contextmanager
def whole_parameters(groups: Sequence[FlatGroup], gathering: Gathering, *, writeback: bool) -> Iterator[None]:
    """Context in which the parameters of these groups are ordinary ones.  Collective, at both ends.

    Args:
        writeback: at the end, write values that were changed, in place or by another parameter object, to the
            master shards; with `rank0_only` the first rank's values.  Skipped if the block raises.

    Raises:
        ValueError: at the end, if a parameter was removed or replaced by one of another shape; if with
            `rank0_only` some groups are spread over fewer ranks than others.  Nothing is written back then.
        RuntimeError: at the end, if something else has written to a master shard meanwhile, or a parameter
            was frozen or unfrozen; on the other ranks, if with `rank0_only` the first one fails.  Nothing is
            written back then.
    """
    if gathering.rank0_only:
        require_same_ranks((group.master for group in groups), "gathering to one rank")
    versions = [group.master.version for group in groups]
    fulls = [_gather(group, gathering) for group in groups]
    settle(groups)
    registered = [
        [] if full is None else list(map(nn.Parameter, group.layout.views(full), group.flags))
        for group, full in zip(groups, fulls, strict=True)
    ]
    for group, parameters in zip(groups, registered, strict=True):
        if parameters:
            group.binding.register(parameters)
            for slot, parameter in zip(group.layout.slots, parameters, strict=True):
                TAKEN_AS.leave(parameter, slot.name)
    failure: BaseException | None = None
    try:
        yield
        _check_flags(groups, registered)
        if writeback:
            _check_unchanged(groups, versions)
            _collect(groups, fulls)
    except BaseException as error:
        failure = error
        raise
    finally:
        for group in groups:
            group.params.rebind()
        if writeback and gathering.rank0_only:
            _write_from_rank0(groups, fulls, failure)
        elif writeback and failure is None:
            for group, full in zip(groups, fulls, strict=True):
                assert full is not None
                group.master.store(full)


def _gather(group: FlatGroup, gathering: Gathering) -> Tensor | None:
    full = group.master.gather(rank0_only=gathering.rank0_only)
    if full is None:
        return None
    host = gathering.offload_to_cpu or group.master.is_offloaded
    return full.cpu() if host else full


def _check_flags(groups: Sequence[FlatGroup], registered: Sequence[Sequence[nn.Parameter]]) -> None:
    for group, parameters in zip(groups, registered, strict=True):
        slots = zip(group.layout.slots, group.flags, strict=True)
        for (slot, trains), parameter in zip(slots, parameters, strict=False):
            if parameter.requires_grad != trains:
                raise RuntimeError(
                    f"requires_grad of parameter {group.unit.prefix}{slot.name} was changed while it was "
                    "summoned, which would be lost; call requires_grad_() outside of the block"
                )


def _check_unchanged(groups: Sequence[FlatGroup], versions: Sequence[tuple[int, int]]) -> None:
    for group, version in zip(groups, versions, strict=True):
        if group.master.version != version:
            raise RuntimeError(
                f"the shards of unit {group.name} were written to (by an optimizer, or by loading) while its "
                "full parameters were summoned, and would be overwritten; do that outside the block"
            )


def _collect(groups: Sequence[FlatGroup], fulls: Sequence[Tensor | None]) -> None:
    """Copies the values of replaced parameter objects into the buffers, after checking all of them."""
    writes = [
        write
        for group, full in zip(groups, fulls, strict=True)
        if full is not None
        for write in group.binding.replaced(group.layout.views(full))
    ]
    with torch.no_grad():
        for view, value in writes:
            view.copy_(value)


def _write_from_rank0(
    groups: Sequence[FlatGroup], fulls: Sequence[Tensor | None], failure: BaseException | None
) -> None:
    if not groups:
        return
    master = groups[0].master
    problem = broadcast_object(
        None if failure is None else repr(failure), master.grid.dimensions[:2], master.device
    )
    if problem is None:
        for group, full in zip(groups, fulls, strict=True):
            group.master.store_from_rank0(None if full is None else full.to(group.master.device))
    elif failure is None:
        raise RuntimeError(f"parameters were not written back, because the first rank failed: {problem}")
