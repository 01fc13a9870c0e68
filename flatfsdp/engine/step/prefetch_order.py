"""Records the order in which a forward calls its units, to know what the next one should gather ahead.

In:   units as they are called (`driven_unit.py`).
Out:  the units to gather ahead, in a forward and in its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from flatfsdp.engine.step.unit import Unit
from flatfsdp.options import Prefetch


class Forward:
    """One forward of the root.

    Attributes:
        units: in the order of their calls.
        trained: groups whose parameters its graph may lead to.
    """

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self.units: list[Unit] = []
        self.trained = {group for unit in units for group in unit.trained}

    def record(self, unit: Unit) -> int:
        """Notes that `unit` runs now; returns its position."""
        if unit not in self.units:
            # The unit may have been frozen since the forward began.
            self.trained.difference_update(unit.groups)
        self.trained.update(unit.trained)
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

    def forget(self) -> None:
        """Forgets a failed forward, which may differ between ranks: the next one gathers nothing ahead."""
        self._previous, self.current = Forward(), Forward()

    def after(self, position: int) -> Iterator[Unit]:
        """Units to gather ahead in a forward: those that followed this position in the previous one."""
        previous = self._previous.units
        if position < len(previous) and previous[position] is self.current.units[position]:
            yield from previous[position + 1 : position + 1 + self._prefetch.forward]

    def before(self, forward: Forward, position: int) -> Iterator[Unit]:
        """Units to gather ahead in the backward of a forward."""
        earlier = (unit for unit in reversed(forward.units[:position]) if not unit.backward_done)
        return islice(earlier, self._prefetch.backward)
