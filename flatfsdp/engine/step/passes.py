"""`ForwardOrder` and `Backward`: which units the forwards of a model, and its running backward, have reached.

In:   units as they are called, and the events of a backward (`driven_unit.py`).
Out:  the units to gather ahead, in a forward and in its backward; one call at the end of a backward, when all
      gradients have landed, or the knowledge that it failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from flatfsdp.engine.step.unit import Unit
from flatfsdp.options import Prefetch
from flatfsdp.torch_private import call_at_end_of_backward, running_backward


class Forward:
    """One forward of the root.

    Attributes:
        units: in the order of their calls.
        trained: groups whose parameters its graph may lead to.
    """

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self.units: list[Unit] = []
        self.trained = {group for unit in units for group in unit.groups if group.trains}

    def record(self, unit: Unit) -> int:
        """Notes that `unit` runs now; returns its position."""
        if unit not in self.units:
            # The unit may have been frozen since the forward began.
            self.trained.difference_update(unit.groups)
        self.trained.update(group for group in unit.groups if group.trains)
        self.units.append(unit)
        return len(self.units) - 1


class ForwardOrder:
    """Order in which a forward called its units, for prefetching.

    Attributes:
        current: the running forward, or the last one.
    """

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch
        self._previous = Forward()
        self.current = Forward()

    def start(self, units: Iterable[Unit]) -> None:
        """Begins a forward of the root, in which some of these units run."""
        self._previous, self.current = self.current, Forward(units)

    def after(self, position: int) -> Iterator[Unit]:
        """Units to gather ahead in a forward: those that followed this position in the previous one."""
        previous = self._previous.units
        if position < len(previous) and previous[position] is self.current.units[position]:
            yield from previous[position + 1 : position + 1 + self._prefetch.forward]

    def before(self, forward: Forward, position: int) -> Iterator[Unit]:
        """Units to gather ahead in the backward of a forward."""
        earlier = (unit for unit in reversed(forward.units[:position]) if not unit.backward_done)
        return islice(earlier, self._prefetch.backward)


class Backward:
    """The running backward of one model, with the backwards that reentrant checkpointing nests inside.

    Args:
        ended: called when all gradients of a backward have landed.

    Attributes:
        is_open: whether a backward has begun that has neither ended nor been abandoned.
        number: autograd's number of the outermost backward, the last one that was opened.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self.is_open = False
        self.number = -1
        self._reached: list[Forward] = []
        self._end: weakref.ref[Callable[[], None]] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a backward began whose end will never be called."""
        return self.is_open and (self._end is None or self._end() is None)

    def open(self) -> None:
        """Begins the outermost backward."""

        def end() -> None:
            self._ended()

        # Autograd keeps the function until the backward ends, and drops it uncalled if the backward fails.
        call_at_end_of_backward(end)
        self._end = weakref.ref(end)
        self.number = running_backward()
        self.is_open = True

    def reach(self, forward: Forward | None) -> None:
        """Includes in the step's reduction the groups that `forward` trained and that are still trained."""
        if forward is None or forward in self._reached:
            return
        self._reached.append(forward)
        for group in forward.trained:
            if group.trains:
                group.join_step()

    def close(self) -> None:
        """Ends the backward, or abandons it."""
        self.is_open = False
        self._reached.clear()
