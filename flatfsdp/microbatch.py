"""`Microbatch`: the position in the running step: first, last, or in between.

A root module and all its units share one `Microbatch`.  `no_sync()`, `set_is_last_backward()` and
`microbatches()` write it.  Units read it when a gradient lands, never in the forward, so pipeline schedules,
in which the forward of one microbatch runs before the backward of another, need nothing special.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from flatfsdp.contract.claimed import FSDP_STATE

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class Microbatch:
    """Position in the running step.

    Args:
        turns: with lanes, number of those that this rank works through in a step (`comm/lanes.py`).

    Attributes:
        has_lanes: whether there are lanes.
        turns: number of turns in a step, 1 without lanes; gradients are reduced at the end of each.
        per_turn: number of microbatches in a turn; None outside of a loop that knows it.
        place: number of the batch that a loop is at; None outside of a loop.
        is_first: whether this is the first microbatch of a step; set by `microbatches`.
        is_last: whether the running backward, or the next one, is the last of the step.
        index: number of backwards finished in this step.
        steps_reduced: number of steps that ended with a reduction, in which all ranks take part.
        step: number of steps ended, reduced or abandoned.
        awaits_gradients: whether no gradient has landed since the model's last training forward.
        is_left: whether a loop was left before the last backward of this step.  What it accumulated is
            dropped at the next forward or backward; until then an optimizer's step raises, unless it was
            zeroed.
        at_end_of_step: called at the end of each step, whether it was reduced or abandoned.
    """

    def __init__(self, turns: int | None = None) -> None:
        self.has_lanes = turns is not None
        self.turns = turns or 1
        self.per_turn: int | None = None
        self.place: int | None = None
        self.is_first = True
        self.is_last = True
        self.index = 0
        self.step = 0
        self.steps_reduced = 0
        self.awaits_gradients = False
        self.is_left = False
        self.at_end_of_step: list[Callable[[], None]] = []
        self._loop: object = None
        self._loop_step = -1

    @property
    def turn(self) -> int:
        """Number of turns that are over in this step."""
        return 0 if self.per_turn is None else self.index // self.per_turn

    @property
    def begins_turn(self) -> bool:
        """Whether the running backward, or the next one, is the first of its turn."""
        return self.index == 0 if self.per_turn is None else self.index % self.per_turn == 0

    @property
    def ends_turn(self) -> bool:
        """Whether the running backward, or the next one, is the last of its turn."""
        return self.is_last or (self.per_turn is not None and (self.index + 1) % self.per_turn == 0)

    def require_turns(self) -> None:
        """Checks that something tells where each turn ends.

        Raises:
            RuntimeError: outside of `microbatches`, if there are several turns.
        """
        if self.turns > 1 and self.per_turn is None:
            raise RuntimeError(
                f"each rank works through {self.turns} lanes in a step; run all its microbatches inside "
                "flatfsdp.microbatches(model, batches), which tells where a lane ends, as no_sync() and "
                "set_is_last_backward() do not"
            )

    def require_place(self) -> None:
        """Checks, before a backward, that lanes have the microbatches that the loop gives them.

        Raises:
            RuntimeError: if a batch of the loop had no backward, or several, or one has failed.
        """
        if self.has_lanes and self.place is not None and self.index != self.place:
            raise RuntimeError(
                f"this is backward {self.index} of the step, at batch {self.place} of the loop: with lanes "
                "every batch of microbatches() has one backward, while it is its turn. Add up several losses "
                "first; leave out a whole step instead of a batch, on all ranks; begin a new loop after a "
                "failure"
            )

    def end_step(self) -> None:
        """Ends the step, whether it was reduced or abandoned."""
        self.step += 1
        self.index = 0
        self.is_left = False
        for callback in self.at_end_of_step:
            callback()

    def drop_left(self) -> None:
        """Drops what was accumulated in a loop that was left before its last backward."""
        if self.is_left:
            self.end_step()

    def begin_loop(self, loop: object, total: int | None) -> None:
        """Begins a `microbatches` loop; what an unfinished step accumulated becomes stale.

        Args:
            loop: what `end_loop` is told again.
            total: number of its microbatches; None if that is not known.

        Raises:
            ValueError: if the turns of this rank cannot have equally many.
        """
        if total is not None and total % self.turns:
            raise ValueError(
                f"{total} microbatches on a rank that works through {self.turns} lanes in a step: each lane "
                f"has to have equally many; take a multiple of {self.turns} on all ranks, and leave out what "
                "an epoch has too few of at its end"
            )
        self.per_turn = None if total is None else total // self.turns
        self._leave_loop()
        self._loop = loop
        self.end_step()
        self._loop_step = self.step

    def end_loop(self, loop: object) -> None:
        """Returns to one microbatch a step, unless a later loop has begun: a failed loop may end late."""
        if self._loop is loop:
            self.is_first = self.is_last = True
            self._leave_loop()
            self.per_turn = self.place = None

    def _leave_loop(self) -> None:
        """Notes that what was accumulated without a last backward is to be dropped."""
        if self._loop is not None and self.step == self._loop_step and self.index > 0:
            logger.warning(
                "microbatches() ended without a backward of its last batch: gradients were not reduced, and "
                "those of %d backwards are dropped",
                self.index,
            )
            self.is_left = True
        self._loop = None

    @contextmanager
    def not_last(self) -> Iterator[None]:
        """Context in which backwards are not the last ones of a step."""
        before, self.is_last = self.is_last, False
        try:
            yield
        finally:
            self.is_last = before


def microbatches(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields the batches of one optimizer step, and tells FlatFSDP which is the first and the last.

    Run forward and backward of each batch inside the loop; gradients are reduced in the last one's
    backward (or in each, with `grad_sync="every"`).  Looks one batch ahead, so `batches` may be a generator;
    with several lanes a rank, whose ends depend on the number of batches, it takes all of them at first.
    If the last batch gets no backward, because the loop was left with `break` or the batch was skipped, the
    step reduces nothing.  Accumulated gradients are dropped, with a warning, and an optimizer's step before
    the next forward raises, unless `zero_grad()` was called.

        for tokens, targets in microbatches(model, batches):
            model(tokens, targets).backward()
        optimizer.step()

    Raises:
        TypeError: if `model` is no module.
        ValueError: if the lanes of this rank cannot have equally many batches.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"microbatches(model, batches) takes the model first, not a {type(model).__name__}")
    # Before the root module is first called, each unit has a `Microbatch` of its own.
    units = filter(None, (FSDP_STATE.of(module) for module in model.modules()))
    states = {unit.shared.microbatch for unit in units}
    total = None
    if any(state.turns > 1 for state in states):
        batches = list(batches)
        total = len(batches)
    source = iter(batches)
    loop = missing = object()
    batch = next(source, missing)
    for state in states:
        state.begin_loop(loop, total)
    place = 0
    try:
        while batch is not missing:
            following = next(source, missing)
            for state in states:
                state.is_first, state.is_last, state.place = place == 0, following is missing, place
            yield batch  # type: ignore[misc]
            batch, place = following, place + 1
    finally:
        for state in states:
            state.end_loop(loop)
