"""Shows units' parameters as ordinary ones for a while: whole, in master precision, in the modules.

In:   units.
Out:  inside `whole_units`, what `summon_full_params` and `state_dict` show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from flatfsdp.comm.objects import broadcast_object
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.storage.master import require_same_ranks
from flatfsdp.engine.whole.units import UnitModule, root_of
from flatfsdp.options import Gathering

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


def whole_for_state_dict(unit: UnitModule) -> AbstractContextManager[None]:
    """Context in which a `state_dict()` finds the parameters of this unit.  Collective."""
    root_of(unit)
    return whole_units([unit], state_dict_gathering(), writeback=False)


@contextmanager
def whole_units(units: Sequence[UnitModule], gathering: Gathering, *, writeback: bool) -> Iterator[None]:
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
    fresh = [unit for unit in units if not unit.fsdp_state.is_whole]
    for unit in fresh:
        unit.fsdp_state.writes.require_none()
    groups = [group for unit in fresh for group in unit.fsdp_state.groups]
    if gathering.rank0_only:
        require_same_ranks((group.master for group in groups), "gathering to one rank")
    gathered = [_Gathered(group, gathering) for group in groups]
    # Before any module changes: if another rank does something else, it raises, and nothing is to be undone.
    settle(groups)
    for each in gathered:
        each.register()
    listers = [
        (lister, group.flat_name, group.master.flat)
        for unit in fresh
        if unit.fsdp_state.lister is not None and (lister := unit.fsdp_state.lister()) is not None
        for group in unit.fsdp_state.groups
    ]
    for lister, name, flat in listers:
        # It stays an attribute, but is not registered.
        del lister._parameters[name]
        vars(lister)[name] = flat
    for unit in fresh:
        unit.fsdp_state.is_whole, unit.fsdp_state.writes_back = True, writeback
    failure: BaseException | None = None
    try:
        yield
        for each in gathered:
            each.require_same_flags()
        if writeback:
            for each in gathered:
                each.require_unwritten()
            # All of them are checked before the first one is copied.
            has_values = [each for each in gathered if each.views]
            replaced = [write for each in has_values for write in each.group.binding.replaced(each.views)]
            with torch.no_grad():
                for view, value in replaced:
                    view.copy_(value)
    except BaseException as error:
        failure = error
        raise
    finally:
        for unit in fresh:
            unit.fsdp_state.is_whole = unit.fsdp_state.writes_back = False
        for lister, name, flat in listers:
            del vars(lister)[name]
            lister._parameters[name] = flat
        for group in groups:
            group.params.rebind()
        problem = None if failure is None else repr(failure)
        if writeback and gathered:
            if gathering.rank0_only:
                # Otherwise the others would wait in the scatter for values of a rank that has failed.
                master = groups[0].master
                problem = broadcast_object(problem, master.grid.dimensions[:2], master.device)
            if problem is None:
                for each in gathered:
                    each.store(from_rank0=gathering.rank0_only)
            elif failure is None:
                raise RuntimeError(
                    f"parameters were not written back, because the first rank failed: {problem}"
                )


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

    def require_same_flags(self) -> None:
        """Raises RuntimeError if a parameter was frozen or unfrozen: its slot would not follow."""
        layout, flags = self.group.layout, self.group.flags
        for slot, trains, parameter in zip(layout.slots, flags, self.parameters, strict=False):
            if parameter.requires_grad != trains:
                raise RuntimeError(
                    f"requires_grad of parameter {self.group.unit.prefix}{slot.name} was changed while it "
                    "was summoned, which would be lost; call requires_grad_() outside of the block"
                )

    def require_unwritten(self) -> None:
        """Raises RuntimeError if the shard was written to meanwhile, whose values would be lost."""
        if self.group.master.version != self._version:
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
