"""Activation recompute with the scales of the first time.

In:   a function with FP8 layers inside, which autograd will run once more in backward.
Out:  the second run casts with the same scales, records no amax, and casts no weight again that is cached.

A `Tape` holds the region and the scales of each use, in order; tapes of nested checkpoints form a chain.
PyTorch's own checkpoints know nothing of tapes: what they run finds them on the Python stack
(`torch_private.running_checkpoints`), and the tape hangs on what the checkpoint itself keeps for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from flatfsdp.comm.rng import GetTracker, Tracker
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.region import Region, current_region
from flatfsdp.kernels.cast.scaling import Scales
from flatfsdp.torch_private import (
    CheckpointRun,
    in_backward,
    may_run_in_checkpoint,
    running_checkpoints,
)


@dataclass(slots=True)
class Use:
    """One use of a layer inside a checkpoint.

    Attributes:
        region: the autocast of the first run; None where there was none.
        scales: that the first run cast with; None until it has.
    """

    region: Region | None
    scales: tuple[Scales, ...] | None = None

    def scales_of(self, scaling: Scaling) -> tuple[Scales, ...]:
        """The scales for this use: today's in the first run, and then those of the first run."""
        if self.scales is None:
            self.scales = scaling.scales()
        return self.scales


class Tape:
    """What one checkpoint cast with.

    Attributes:
        trains: whether gradients were on when the checkpoint was called; inside a reentrant one they are off.
        is_replay: whether this run repeats an earlier one.
    """

    def __init__(
        self,
        outer: Tape | None,
        recorded: dict[nn.Module, list[Use]] | None,
        trains: bool,
        tracker: Tracker | None = None,
    ) -> None:
        self.trains = trains
        self._tracker = tracker
        self._outer = outer
        self._recorded = recorded
        self._position: dict[nn.Module, int] = {}
        self.uses: dict[nn.Module, list[Use]] = {}
        self.is_replay: bool = recorded is not None or (outer is not None and outer.is_replay)

    def repeats(self, tracker: Tracker) -> bool:
        """Whether a replay draws the same numbers from `tracker` as the first run."""
        return self._tracker is tracker or (self._outer is not None and self._outer.repeats(tracker))

    def replay(self) -> Tape:
        """The tape of one more run of the same."""
        return Tape(None, self.uses, self.trains, self._tracker)

    def next_use(self, layer: nn.Module) -> Use | None:
        """The next use of `layer`: a new one, or that of the run that is repeated; None if that had none.

        Raises:
            RuntimeError: if the run that is repeated did not use the layer so often.
        """
        if self._recorded is None:
            use = Use(current_region()) if self._outer is None else self._outer.next_use(layer)
            if use is not None:
                self.uses.setdefault(layer, []).append(use)
            return use
        recorded = self._recorded.get(layer)
        if recorded is None:
            return None
        position = self._position.get(layer, 0)
        self._position[layer] = position + 1
        if position >= len(recorded):
            raise RuntimeError(
                f"a recomputation runs {type(layer).__name__} more often than the forward did; a "
                "checkpointed function has to do the same both times"
            )
        return recorded[position]


_tape: ContextVar[Tape | None] = ContextVar("flatfsdp_tape", default=None)


def current_tape() -> Tape | None:
    """The tape of the innermost checkpoint that runs now: of `checkpoint`, or of PyTorch's own."""
    ours = _tape.get()
    if ours is None and not may_run_in_checkpoint():
        return None
    runs: list[CheckpointRun] = []
    outer: Tape | None = None
    for run in running_checkpoints(until=_Recomputed.__call__.__code__):
        if run is None:
            outer = ours
            break
        runs.append(run)
    for run in reversed(runs):
        outer = _tape_of(run, outer)
    return outer


def _tape_of(run: CheckpointRun, outer: Tape | None) -> Tape:
    """The tape of one of PyTorch's checkpoints, which keeps it."""
    kept = vars(run.owner)
    if run.recomputation is None:
        first: Tape | None = kept.get(_FIRST)
        if first is None:
            first = kept[_FIRST] = Tape(outer, None, run.trains or (outer is not None and outer.trains))
        return first
    recomputation, replay = kept.get(_REPLAY, (None, None))
    if replay is None or recomputation != run.recomputation:
        # A forward without such layers has no tape.
        replay = kept.get(_FIRST, Tape(None, None, trains=True)).replay()
        kept[_REPLAY] = run.recomputation, replay
    return replay


_FIRST, _REPLAY = "_flatfsdp_first_tape", "_flatfsdp_replayed_tape"


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
        self._outer = outer = current_tape()
        # Inside a reentrant checkpoint gradients are off for the first time.
        self._trains = torch.is_grad_enabled() if outer is None else outer.trains
        self._first: Tape | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = tape = Tape(self._outer, None, self._trains, self._tracker)
            self._states = self._tracker.get_states() if has_states(self._tracker) else None
            numbers: AbstractContextManager[None] = nullcontext()
        else:
            tape = self._first.replay()
            numbers = nullcontext() if self._states is None else _back_at(self._tracker, self._states)
        with _playing(tape), numbers:
            return self._function(*args, **kwargs)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    get_rng_state_tracker: GetTracker | None = None,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the states of a tracker of random numbers put back, too.

    FP8 layers give the same results, bit for bit, inside PyTorch's own function as well.

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


def records_amax(tape: Tape | None) -> bool:
    """Whether a forward that runs now is to record amaxes: it trains, and for the first time.

    Args:
        tape: the current one.
    """
    return torch.is_grad_enabled() if tape is None else tape.trains and not tape.is_replay


def raise_recomputed() -> NoReturn:
    raise RuntimeError(
        "an FP8 layer is recomputed in backward by something that FlatFSDP does not know, or in eval() mode "
        "by a reentrant checkpoint; its scales have moved on by then, and its autocast is over: use "
        "torch.utils.checkpoint or flatfsdp.fp8.checkpoint, with use_reentrant=False"
    )
