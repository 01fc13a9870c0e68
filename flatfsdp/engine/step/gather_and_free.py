"""Gathers a unit's parameters in one launch, overlapped with compute, and frees them after use.

In:   the groups of a unit (`engine/storage/group.py`), and the stream for the gather.
Out:  filled buffers; each group's is waited for when a module needs it, and freed afterwards.
Next: `unit.py` says when.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatfsdp.byte_ledger import span
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.streams import SideStream
from flatfsdp.engine.storage.group import FlatGroup, ShardState


def unshard(groups: Sequence[FlatGroup], stream: SideStream, action: Action) -> None:
    """Starts to gather the parameters of one unit, all groups in one launch, if they are missing or stale.

    Args:
        action: purpose of the gather; a backward also needs the transposes of FP8 weights.
    """
    missing = [group for group in groups if group.allocate()]
    untransposed = []
    if action is Action.BACKWARD:
        untransposed = [
            group for group in groups if group.fp8 is not None and group.fp8.allocate_columnwise()
        ]
    if not missing and not untransposed:
        return
    with stream.after_compute():
        for group in missing:
            group.update_shard()
        _gather(missing, action)
        for group in untransposed:
            group.transpose()
    event = stream.mark()
    for group in {*missing, *untransposed}:
        group.started(event)


def wait(groups: Sequence[FlatGroup]) -> None:
    """Makes the compute stream wait until the parameters of one unit are gathered."""
    for group in groups:
        group.wait()


def reshard(groups: Sequence[FlatGroup]) -> None:
    """Frees the gathered parameters of one unit, once the compute stream has used them."""
    for group in groups:
        group.reshard()


def reshard_unused(groups: Sequence[FlatGroup]) -> None:
    """Frees what was gathered ahead and not waited for."""
    reshard([group for group in groups if group.state is ShardState.GATHERING])


def _gather(groups: Sequence[FlatGroup], action: Action) -> None:
    nbytes = sum(group.gathered_bytes for group in groups)
    if not nbytes:
        return
    first = groups[0]
    with (
        span("all_gather", first.name, first.microbatch.index, nbytes),
        launch(first.grid.shard, first.identify(action), first.master.device, len(groups)),
    ):
        for group in groups:
            group.gather()
    first.ledger.add("gather", nbytes)
