"""`Backward`: tracks a model's running backward, the forwards that it has reached, and its end.

In:   calls from the first event of a backward (`driven_unit.py`), and from many later ones.
Out:  one call at the end of the backward, when all gradients have landed; or the knowledge that it failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from flatfsdp.engine.step.prefetch_order import Forward
from flatfsdp.torch_private import call_at_end_of_backward, running_backward


class Backward:
    """The running backward of one model, with the backwards that reentrant checkpointing nests inside.

    Args:
        ended: called when all gradients of a backward have landed.

    Attributes:
        is_open: whether a backward has begun that has neither ended nor been abandoned.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self.is_open = False
        self._number = -1
        self._reached: list[Forward] = []
        self._end: weakref.ref[Callable[[], None]] | None = None

    def is_running(self, number: int) -> bool:
        """Whether the open backward is number `number`, which autograd runs now."""
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
        """Whether a backward began whose end will never be called."""
        return self.is_open and (self._end is None or self._end() is None)

    def open(self) -> None:
        """Begins the outermost backward."""
        self._reached.clear()

        def end() -> None:
            self._ended()

        # Autograd keeps the function until the backward ends, and drops it uncalled if the backward fails.
        call_at_end_of_backward(end)
        self._end = weakref.ref(end)
        self._number = running_backward()
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
