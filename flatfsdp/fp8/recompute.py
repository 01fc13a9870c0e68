"""Activation recompute with the scales of the first time.

In:   a function with FP8 layers inside, which autograd will run once more in backward.
Out:  the second run casts with the same scales, records no amax, and casts no weight again that is cached.

A `Tape` holds the generation of scales of each use, in order; tapes of nested checkpoints form a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from flatfsdp.comm.rng import GetTracker, Tracker
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.region import Region, current_region, entered
from flatfsdp.kernels.cast.scaling import Scales
from flatfsdp.torch_private import in_backward


class Tape:
    """What one checkpoint cast with.

    Attributes:
        trains: whether gradients were on when the checkpoint was called; inside a reentrant one they are off.
        is_replay: whether this run repeats an earlier one.
    """

    def __init__(
        self,
        outer: Tape | None,
        recorded: dict[nn.Module, list[tuple[Scales, ...]]] | None,
        trains: bool,
        tracker: Tracker | None,
    ) -> None:
        self.trains = trains
        self._tracker = tracker
        self._outer = outer
        self._recorded = recorded
        self._position: dict[nn.Module, int] = {}
        self.uses: dict[nn.Module, list[tuple[Scales, ...]]] = {}
        self.is_replay: bool = recorded is not None or (outer is not None and outer.is_replay)

    def repeats(self, tracker: Tracker) -> bool:
        """Whether a replay draws the same numbers from `tracker` as the first run."""
        return self._tracker is tracker or (self._outer is not None and self._outer.repeats(tracker))

    def scales(self, scaling: Scaling) -> tuple[Scales, ...]:
        """The scales for the next use of `scaling`: today's, or those of the run that is repeated."""
        layer = scaling.owner
        if self._recorded is not None:
            position = self._position.get(layer, 0)
            self._position[layer] = position + 1
            recorded = self._recorded.get(layer, ())
            if position >= len(recorded):
                raise RuntimeError(
                    f"a recomputation runs {type(layer).__name__} more often in FP8 than the forward did; a "
                    "checkpointed function has to do the same both times"
                )
            return recorded[position]
        scales = scaling.scales() if self._outer is None else self._outer.scales(scaling)
        self.uses.setdefault(layer, []).append(scales)
        return scales


_tape: ContextVar[Tape | None] = ContextVar("flatfsdp_tape", default=None)


def current_tape() -> Tape | None:
    return _tape.get()


@contextmanager
def _playing(tape: Tape) -> Iterator[None]:
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


class _Recomputed:
    """Calls `function`: the first call is recorded, every later one repeats it."""

    def __init__(self, function: Callable[..., Any], tracker: Any) -> None:
        self._function = function
        self._tracker = tracker
        self._states: Any = None
        outer = current_tape()
        # Inside a reentrant checkpoint gradients are off for the first time.
        self._trains = torch.is_grad_enabled() if outer is None else outer.trains
        self._region: Region | None = None
        self._first: Tape | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._region = current_region()
            self._first = tape = Tape(current_tape(), None, self._trains, self._tracker)
            self._states = self._tracker.get_states() if has_states(self._tracker) else None
            numbers: AbstractContextManager[None] = nullcontext()
        else:
            tape = Tape(None, self._first.uses, self._trains, self._tracker)
            numbers = nullcontext() if self._states is None else _back_at(self._tracker, self._states)
        # A recomputation may run in another thread, which knows nothing of the region.
        with _playing(tape), entered(self._region), numbers:
            return self._function(*args, **kwargs)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    get_rng_state_tracker: GetTracker | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` for functions with FP8 layers inside; same results, bit for bit.

    Args:
        function: a module or function; autocast may be inside or around it.
        use_reentrant: as in torch.  With True the gradients' scales are updated once a checkpoint.
        get_rng_state_tracker: the one that layers inside got, if it is not FlatFSDP's: the states that it has
            (`get_states`, `set_states`) are put back for the recomputation.
        kwargs: for `function`, or torch's own, such as preserve_rng_state.
    """
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    return torch_checkpoint(_Recomputed(function, tracker), *args, use_reentrant=use_reentrant, **kwargs)


def has_states(tracker: object) -> bool:
    """Whether numbers depend on more than torch's default generators, which checkpoints put back."""
    return hasattr(tracker, "get_states")


def require_repeatable(tracker: Tracker) -> None:
    """Checks that a recomputation draws the forward's numbers.

    Raises:
        RuntimeError: in a recomputation, if it would draw other numbers from `tracker` than the forward.
    """
    if not has_states(tracker):
        return
    tape = current_tape()
    if in_backward() if tape is None else tape.is_replay and not tape.repeats(tracker):
        raise RuntimeError(
            f"a recomputation draws dropout from a {type(tracker).__name__}, whose states have moved on "
            "since the forward; use flatfsdp.fp8.checkpoint, and pass it get_rng_state_tracker, too"
        )


@contextmanager
def _back_at(tracker: Any, states: Any) -> Iterator[None]:
    """Inside, the tracker has the states of earlier."""
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)


def records_amax() -> bool:
    """Whether a forward that runs now is to record amaxes: it trains, and for the first time.

    Raises:
        RuntimeError: in a recomputation that nobody told about the scales of the first time.
    """
    tape = current_tape()
    if tape is not None:
        return tape.trains and not tape.is_replay
    if in_backward():
        raise_recomputed()
    return torch.is_grad_enabled()


def raise_recomputed() -> NoReturn:
    raise RuntimeError(
        "an FP8 layer is recomputed in backward, where its scales have moved on and its autocast is over; "
        "use flatfsdp.fp8.checkpoint instead of torch.utils.checkpoint.checkpoint"
    )
