"""`checkpoint`: activation checkpointing with the scales of the first run.

In:   a function with FP8 layers inside, which autograd runs again in backward.
Out:  the second run casts with the same scales, records no amax, and does not repeat cached casts of weights.

A `Tape` holds the region and the scales of each use, in order; tapes of nested checkpoints form a chain.
PyTorch's own checkpoints have no tapes: layers inside find the checkpoint on the Python stack
(`torch_private.running_checkpoints`), and the tape is attached to what it keeps for backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from flatfsdp.comm.rng import GetTracker, Tracker
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.region import Region, current_region
from flatfsdp.kernels.cast.scaling import Scales
from flatfsdp.torch_private import CheckpointRun, in_backward, may_run_in_checkpoint, running_checkpoints


@dataclass(slots=True)
class Use:
    """One use of a layer inside a checkpoint.

    Attributes:
        region: the autocast of the first run; None if there was none.
        scales: the scales of the first run's casts; None before them.
    """

    region: Region | None
    scales: tuple[Scales, ...] | None = None

    def scales_of(self, scaling: Scaling) -> tuple[Scales, ...]:
        """The scales for this use: the current ones in the first run, then those of the first run."""
        if self.scales is None:
            self.scales = scaling.scales()
        return self.scales


@dataclass(eq=False)
class Tape:
    """The regions and scales that one checkpoint used.

    Attributes:
        outer: the tape of the checkpoint around it.
        recorded: the uses of the run that this one repeats; None in a first run.
        trains: whether gradients were on when the checkpoint was called; inside a reentrant one they are off.
        tracker: random numbers that a replay draws as the first run did.
        uses: the uses of each layer, in order.
    """

    outer: Tape | None
    recorded: dict[nn.Module, list[Use]] | None
    trains: bool
    tracker: Tracker | None = None
    uses: dict[nn.Module, list[Use]] = field(default_factory=dict)
    _position: Counter[nn.Module] = field(default_factory=Counter)

    @property
    def is_replay(self) -> bool:
        """Whether this run repeats an earlier one."""
        # A checkpoint inside a recomputed one has a first run of its own there, which repeats the outer
        # one's.
        return self.recorded is not None or (self.outer is not None and self.outer.is_replay)

    def repeats(self, tracker: Tracker) -> bool:
        """Whether a replay draws the same numbers from `tracker` as the first run."""
        return self.tracker is tracker or (self.outer is not None and self.outer.repeats(tracker))

    def replay(self) -> Tape:
        """The tape of another run of the same function."""
        return Tape(None, self.uses, self.trains, self.tracker)

    def next_use(self, layer: nn.Module) -> Use | None:
        """The next use of `layer`: a new one, or the repeated run's; None if that did not use the layer.

        Raises:
            RuntimeError: if the repeated run used the layer fewer times.
        """
        if self.recorded is None:
            # The same `Use` on both tapes, because either checkpoint may be the one that runs again; inside a
            # recomputation it is the one of the very first run.
            use = Use(current_region()) if self.outer is None else self.outer.next_use(layer)
            if use is not None:
                self.uses.setdefault(layer, []).append(use)
            return use
        recorded = self.recorded.get(layer)
        if recorded is None:
            return None
        position = self._position[layer]
        self._position[layer] += 1
        if position >= len(recorded):
            cause = f"runs {type(layer).__name__} more often in backward than in forward"
            raise RuntimeError(f"activation checkpointing {cause}; it has to do the same both times")
        return recorded[position]


_tape: ContextVar[Tape | None] = ContextVar("flatfsdp_tape", default=None)


def current_tape() -> Tape | None:
    """The tape of the innermost running checkpoint, ours or PyTorch's."""
    ours = _tape.get()
    # Most forwards run in no checkpoint, and a walk over the stack takes long.
    if ours is None and not may_run_in_checkpoint():
        return None
    runs: list[CheckpointRun] = []
    outer: Tape | None = None
    for run in running_checkpoints(until=_Recomputed.__call__.__code__):
        if run is None:
            outer = ours
            break
        runs.append(run)
    # The stack has the innermost run first; a tape needs its outer one.
    for run in reversed(runs):
        outer = _tape_of(run, outer)
    return outer


def _tape_of(run: CheckpointRun, outer: Tape | None) -> Tape:
    """The tape of one of PyTorch's checkpoints, which holds it."""
    # In what the checkpoint itself keeps for its backward, so that the tape lives exactly as long.
    kept = vars(run.owner)
    if run.recomputation is None:
        first: Tape | None = kept.get(_FIRST)
        if first is None:
            first = kept[_FIRST] = Tape(outer, None, run.trains or (outer is not None and outer.trains))
        return first
    recomputation, replay = kept.get(_REPLAY, (None, None))
    # Each backward through the graph runs the function again, from the first use of each layer on.
    if replay is None or recomputation != run.recomputation:
        # A forward without FP8 layers has left no tape.
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
        # Inside a reentrant checkpoint, gradients are off in the first run.
        self._trains = torch.is_grad_enabled() if outer is None else outer.trains
        self._first: Tape | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = tape = Tape(self._outer, None, self._trains, self._tracker)
            # Before the function draws from it.
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
    """`torch.utils.checkpoint.checkpoint` that also restores the states of a random-number tracker.

    FP8 layers give bit-equal results inside PyTorch's own function as well.

    Args:
        function: a module or function; autocast may be inside or around it.
        args: positional arguments of `function`.
        use_reentrant: as in torch.  With True the gradients' scales are updated once per checkpoint.
        get_rng_state_tracker: the tracker passed to the layers inside, if it is not FlatFSDP's; its states
            (`get_states`, `set_states`) are restored for the recomputation.
        kwargs: keyword arguments of `function`, or torch's own, such as preserve_rng_state.
    """
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    return torch_checkpoint(_Recomputed(function, tracker), *args, use_reentrant=use_reentrant, **kwargs)


def has_states(tracker: object) -> bool:
    """Whether a tracker has state besides torch's default generators, which checkpoints restore."""
    return hasattr(tracker, "get_states")


def require_repeatable(tracker: Tracker) -> None:
    """Checks that a recomputation draws the same numbers as the forward.

    Raises:
        RuntimeError: in a recomputation that would draw other numbers from `tracker`.
    """
    if not has_states(tracker):
        return
    tape = current_tape()
    if in_backward() if tape is None else tape.is_replay and not tape.repeats(tracker):
        raise RuntimeError(
            f"activation checkpointing draws dropout from a {type(tracker).__name__}, whose states have "
            "moved on since the forward; use flatfsdp.fp8.checkpoint, and pass it get_rng_state_tracker, too"
        )


@contextmanager
def _back_at(tracker: Any, states: Any) -> Iterator[None]:
    """Context in which the tracker has earlier states."""
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        # Later forwards go on from the numbers at which earlier ones have stopped.
        tracker.set_states(now)


def records_amax(tape: Tape | None) -> bool:
    """Whether the running forward records amaxes: it trains, and it is the first run.

    Args:
        tape: the current tape, or None.
    """
    return torch.is_grad_enabled() if tape is None else tape.trains and not tape.is_replay


def raise_recomputed() -> NoReturn:
    """Raises the error of a recomputation that FlatFSDP does not recognise."""
    raise RuntimeError(
        "an FP8 layer runs again in backward, in a checkpoint that FlatFSDP does not know, or in eval() in a "
        "reentrant one: use torch.utils.checkpoint or flatfsdp.fp8.checkpoint, with use_reentrant=False"
    )
