"""Shows units' parameters as ordinary ones for a while: whole, in master precision, in the modules.

In:   units.
Out:  inside `whole_units`, what `summon_full_params` and `state_dict` show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from flatfsdp.comm.grid import require_same_ranks
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.whole.units import UnitModule
from flatfsdp.options import Gathering

state_dict_gathering: ContextVar[Gathering] = ContextVar("flatfsdp_state_dict", default=Gathering())  # noqa: B039 - frozen
"""The ranks that get the parameters in a `state_dict()` that this thread calls now."""


@contextmanager
def state_dicts_gathered(gathering: Gathering) -> Iterator[None]:
    """Context in which `state_dict()`, called by this thread, gathers to these ranks."""
    token = state_dict_gathering.set(gathering)
    try:
        yield
    finally:
        state_dict_gathering.reset(token)


@contextmanager
def whole_units(units: Iterable[UnitModule], gathering: Gathering, *, writeback: bool) -> Iterator[None]:
    """Context in which these units have ordinary parameters.  Collective, at both ends.

    Units that have them already are left alone.

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
    fresh = [unit.fsdp_state for unit in units if not unit.fsdp_state.is_whole]
    for state in fresh:
        state.writes.require_none()
    groups = [group for state in fresh for group in state.groups]
    if gathering.rank0_only:
        require_same_ranks((group.grid for group in groups), "gathering to one rank")
    gathered = [_Gathered(group, gathering) for group in groups]
    # Before any module changes: if another rank does something else, it raises, and nothing is to be undone.
    settle(groups)
    for each in gathered:
        each.register()
    for state in fresh:
        _list_flats(state, False)
        state.is_whole, state.writes_back = True, writeback
    failure: str | None = None
    try:
        yield
        for each in gathered:
            each.require_unchanged(writeback=writeback)
        if writeback:
            # All of them are checked before the first one is copied.
            has_values = [each for each in gathered if each.views]
            replaced = [write for each in has_values for write in each.group.binding.replaced(each.views)]
            with torch.no_grad():
                for view, value in replaced:
                    view.copy_(value)
    except BaseException as error:
        failure = repr(error)
        raise
    finally:
        for state in fresh:
            state.is_whole = state.writes_back = False
            _list_flats(state, True)
        for group in groups:
            group.params.rebind()
        if writeback and gathered:
            problem = failure
            if gathering.rank0_only:
                # Otherwise the others would wait in the scatter for values of a rank that has failed.
                master = groups[0].master
                problem = broadcast_object(problem, master.grid.dimensions[:2], master.device)
            if problem is None:
                for each in gathered:
                    each.store(from_rank0=gathering.rank0_only)
            elif failure is None:
                raise RuntimeError(f"parameters were not written back; the first rank failed: {problem}")


def _list_flats(state: Unit, are_listed: bool) -> None:
    """Lets the wrapper that lists flat parameters, if there is one, register them, or keep them unlisted."""
    if state.lister is not None and (lister := state.lister()) is not None:
        lister.list_flats(are_listed)


class _Gathered:
    """The parameters of one group, gathered as ordinary ones.

    Attributes:
        full: their values in one padded buffer; None on ranks that do not get them.
        views: the values by slot, in this buffer; none on such ranks.
        parameters: the parameters over these.
    """

    def __init__(self, group: FlatGroup, gathering: Gathering) -> None:
        self.group = group
        self._version = group.master.version
        self.full = group.master.gather(rank0_only=gathering.rank0_only)
        if self.full is not None and (gathering.offload_to_cpu or group.master.is_offloaded):
            self.full = self.full.cpu()
        self.views = [] if self.full is None else group.layout.views(self.full)
        self.parameters = list(map(nn.Parameter, self.views, group.flags))

    def register(self) -> None:
        """Registers the parameters in their modules; an optimizer that is given them is refused."""
        if self.parameters:
            self.group.binding.register(self.parameters)
        for slot, parameter in zip(self.group.layout.slots, self.parameters, strict=False):
            TAKEN_AS.leave(parameter, slot.name)

    def require_unchanged(self, *, writeback: bool) -> None:
        """Checks for changes that would be lost.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen, as its slot would not follow; with
                `writeback`, if the shard was written to meanwhile.
        """
        layout, flags = self.group.layout, self.group.flags
        for slot, trains, parameter in zip(layout.slots, flags, self.parameters, strict=False):
            if parameter.requires_grad != trains:
                raise RuntimeError(
                    f"requires_grad of parameter {self.group.unit.prefix}{slot.name} was changed while it "
                    "was summoned, which would be lost; call requires_grad_() outside of the block"
                )
        if writeback and self.group.master.version != self._version:
            raise RuntimeError(
                f"the shards of unit {self.group.name} were written to (by an optimizer, or by loading) "
                "while its full parameters were summoned, and would be overwritten; do that outside the block"
            )

    def store(self, *, from_rank0: bool) -> None:
        """Writes the values of this rank, or of the first one, to the shard.  The latter is collective."""
        master = self.group.master
        if from_rank0:
            master.store_from_rank0(None if self.full is None else self.full.to(master.device))
        else:
            assert self.full is not None
            master.store(self.full)
