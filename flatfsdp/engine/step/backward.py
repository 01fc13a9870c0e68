"""`Backward`: whether a backward of the model runs, which forwards it has reached, and how it ends.

In:   whatever happens first in a backward (`unit.py`), and often after that.
Out:  the end of the backward, once, when all gradients have landed; or the knowledge that it has failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from flatfsdp.engine.step.prefetch_order import Forward
from flatfsdp.torch_private import call_at_end_of_backward, running_backward


class _End:
    """Autograd keeps this callable until the backward ends, and drops it uncalled if the backward fails."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __call__(self) -> None:
        self._ended()


class Backward:
    """The running backward of one model, with those that reentrant checkpointing nests inside.

    Args:
        ended: called when all gradients of a backward have landed.

    Attributes:
        is_open: whether one has begun, and has neither ended nor been given up.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self.is_open = False
        self._number = -1
        self._reached: list[Forward] = []
        self._end: weakref.ref[_End] | None = None

    def is_running(self, number: int) -> bool:
        """Whether the open one is what autograd runs now, which is backward `number`."""
        return self.is_open and number == self._number

    @property
    def is_nested(self) -> bool:
        """Whether a backward inside the backward is running: reentrant checkpointing.

        A parameter used in several checkpoints gets a gradient from each of them; only at the end of the
        outer backward is it known that no more will come.
        """
        return running_backward() != self._number

    @property
    def has_failed(self) -> bool:
        """Whether one began whose end was never called and never will be."""
        return self.is_open and (self._end is None or self._end() is None)

    def open(self) -> None:
        """The outermost backward begins."""
        self._reached.clear()
        end = _End(self._ended)
        call_at_end_of_backward(end)
        self._end = weakref.ref(end)
        self._number = running_backward()
        self.is_open = True

    def reach(self, forward: Forward | None) -> None:
        """What was trained in that forward, and still is, takes part in the reduction of the step."""
        if forward is None or forward in self._reached:
            return
        self._reached.append(forward)
        for group in forward.trained:
            if group.trains:
                group.join_step()

    def close(self) -> None:
        """It has ended, or is given up."""
        self.is_open = False
        self._reached.clear()
