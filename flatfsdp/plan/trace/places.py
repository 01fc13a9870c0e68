"""Follows which unit of a model runs, forward or backward, through a step.

In:   the units of a sharded model, by name.
Out:  `StepPlaces.now`, which hooks keep up to date.
Next: `observer.py` books allocations and operators there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from flatfsdp.flat.nested import map_tensors

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class StepPlace(NamedTuple):
    """Part of a step.

    Attributes:
        unit: name of the unit; empty for the root.
        phase: forward, backward or optimizer.
    """

    unit: str
    phase: str


class StepPlaces:
    """Follows a model through its steps.

    A unit's backward begins when the gradient of what it returned is there, and ends with that of what it was
    given.

    Args:
        units: all units but the root.
        went: called after each move.

    Attributes:
        now: the place.
    """

    def __init__(self, units: Mapping[str, nn.Module], went: Callable[[], None]) -> None:
        self.now = StepPlace("", FORWARD)
        self._went = went
        self._running: list[str] = []
        for name, unit in units.items():
            unit.register_forward_pre_hook(lambda _, args, name=name: self._enter(name, args))
            unit.register_forward_hook(lambda _, args, out, name=name: self._leave(name, out))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of a phase of the root; units that run inside have places of their own."""
        before = self.now
        self._go("", phase)
        try:
            yield
        finally:
            self._go(*before)

    def _go(self, unit: str, phase: str) -> None:
        self.now = StepPlace(unit, phase)
        self._went()

    def _enter(self, name: str, args: Any) -> None:
        # A checkpoint runs forwards again, in backward.
        if self.now.phase == FORWARD:
            self._running.append(name)
            self._go(name, FORWARD)
            map_tensors(lambda tensor: self._at_gradient(tensor, partial(self._end, name)), args)

    def _leave(self, name: str, out: Any) -> None:
        if self.now.phase == FORWARD:
            self._running.pop()
            self._go(self._running[-1] if self._running else "", FORWARD)
            map_tensors(lambda tensor: self._at_gradient(tensor, partial(self._begin, name)), out)

    def _at_gradient(self, tensor: Tensor, call: Callable[[Tensor], None]) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(call)
        return tensor

    def _begin(self, name: str, _: Tensor) -> None:
        self._go(name, BACKWARD)

    def _end(self, name: str, _: Tensor) -> None:
        # What one unit was given may be what another one returned, whose backward has begun just now.
        if self.now.unit == name:
            self._go("", BACKWARD)
