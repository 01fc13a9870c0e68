"""`Identity`: the purpose of a collective, in one number that travels with it.

In:   the action, the unit and the microbatch that the engine is about to gather or reduce for.
Out:  a number that must be equal on all ranks of a launch, and a message for two that differ.
Next: `journal.py` sends the numbers along and compares them.

    bit 62                                                       0
    | action 5 | model 12 | unit 12 | step 15 || microbatch 10 | check 9 |
      compared                                   reported        of all bits before

The microbatch is reported but not compared: under ZeRO-2 ranks may correctly run different numbers of
microbatches and add up what they have.  The step number counts reduced steps, which take all ranks.

The last bits tell a number from one that has arrived in part only, and from bytes of a payload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from flatfsdp.comm.ranks import Ranks

_MODELS, _UNITS, _STEPS, _MICROBATCHES, _CHECKS = 1 << 12, 1 << 12, 1 << 15, 1 << 10, 1 << 9

_PRIME = 509
"""The check is the remainder by the largest prime below `_CHECKS`: any byte that differs changes it."""

DEFAULT_TIMEOUT = 60.0
"""Default number of seconds that a rank waits for others."""

FIRST_STEP = 5
"""Factor on this wait until the first step has ended: meanwhile ranks read data and compile."""


class Action(IntEnum):
    """Why the engine launches a collective.

    Attributes:
        words: the same in words.
    """

    words: str

    def __new__(cls, number: int, words: str = "") -> Action:
        """Makes a member whose value is its number."""
        member = int.__new__(cls, number)
        member._value_, member.words = number, words
        return member

    FORWARD = 1, "gathers {unit} for a forward"
    EVALUATION = 2, "gathers {unit} for a forward without gradients"
    BACKWARD = 3, "gathers {unit} for a backward"
    REDUCE_EARLY = 4, "reduces the gradients of {unit} before the last microbatch"
    REDUCE = 5, "reduces the gradients of {unit}"
    REDUCE_REPLICAS = 6, "reduces the gradients of {unit} over replicas"
    REDUCE_PARTIAL = 7, "adds up the gradients of {unit} over tensor-parallel ranks"
    SCALE = 8, "scales FP8 weights"
    SHOW = 9, "gathers whole tensors of {unit} (state_dict, summon_full_params, a checkpoint)"
    STORE = 10, "takes over whole tensors of {unit} (summon_full_params, a checkpoint)"
    NORM = 11, "takes the norm of the gradients"
    BUILD = 12, "compares what it has built"
    MICROBATCH = 13, "runs a microbatch of a replayed model eagerly"
    REPLAY = 14, "replays a recorded microbatch"
    SAVE = 15, "saves a checkpoint"
    OBJECTS = 16, "exchanges Python objects (for a checkpoint, or whole state)"
    EXCHANGE = 17, "exchanges {elements} elements between the ranks that share a layer"
    AMAX = 18, "takes the largest amax of {elements} FP8 tensors"
    SCHEDULE = 19, "runs step {elements} of a pipeline's schedule"
    INPUTS = 20, "takes inputs of {elements} elements for a forward of layers that ranks share"
    LOAD = 21, "loads a checkpoint"
    AVERAGE = 22, "changes between the weights of {unit} and their average (EMA.averaged)"
    USED = 23, "compares which parameters the step has used"
    VALUES = 24, "compares the values that it begins with"
    LANES = 25, "ends a step of {elements} microbatches, of which lanes need equally many on every rank"
    FIGURES = 26, "exchanges the figures of a report (Metrics)"


OF_LAYERS = (Action.EXCHANGE, Action.AMAX)
"""Actions of layers, which do not know their model."""

_COUNTS = {*OF_LAYERS, Action.SCHEDULE, Action.INPUTS, Action.LANES}
"""Actions that send a number of their own in place of unit and step."""

_BETWEEN_STEPS = _COUNTS | {
    *(Action.BUILD, Action.VALUES, Action.SAVE, Action.LOAD, Action.OBJECTS, Action.FIGURES),
}
"""Actions outside of microbatches."""


@dataclass(frozen=True, eq=False)
class ModelIdentity:
    """Part that all identities of one model share.

    Attributes:
        number: number of the model, the same on all ranks and unique; 0 if it has none.
        units: names of the units, in registration order.
        data_parallel: communicators that layers do not use.
        communicators: all communicators that the engine uses for this model.
        timeout: seconds that a rank waits for others; None: as long as the process group allows.
    """

    number: int = 0
    units: Sequence[str] = ()
    data_parallel: Sequence[Ranks] = ()
    communicators: Sequence[Ranks] = ()
    timeout: float | None = None


class Identity(NamedTuple):
    """Purpose of one launch.

    Attributes:
        unit: index of the unit in the model.
        step: number of steps reduced before.
        microbatch: number of backwards before in this step; for messages.
        is_early: whether no step has ended yet; None: tell by `step` being 0.
    """

    action: Action
    model: ModelIdentity = ModelIdentity()
    unit: int = 0
    step: int = 0
    microbatch: int = 0
    is_early: bool | None = None

    @staticmethod
    def counting(
        action: Action, count: int, model: ModelIdentity = ModelIdentity(), is_early: bool | None = None
    ) -> Identity:
        """Identity of a launch that belongs to no unit and carries a count, of elements for example."""
        # A count takes the bits of unit and step; `described` puts it together again.
        return Identity(action, model, count // _STEPS, count, is_early=is_early)

    @property
    def limit(self) -> float | None:
        """Seconds that a rank waits for the others; None: as long as the process group allows."""
        limit = self.model.timeout
        if limit is None or math.isinf(limit):
            return None
        is_early = self.is_early
        if is_early is None:
            # These carry no step, so that 0 says nothing about them.
            is_early = self.step == 0 and self.action not in (Action.SAVE, Action.LOAD, Action.OBJECTS)
        return limit * FIRST_STEP if is_early else limit

    @property
    def number(self) -> int:
        """The number that travels; positive."""
        # A norm takes parameters in any order, from stages of a pipeline, too: each is a model of its own.
        model = 0 if self.action is Action.NORM else self.model.number
        number = self.action * _MODELS + model % _MODELS
        number = number * _UNITS + self.unit % _UNITS
        number = number * _STEPS + self.step % _STEPS
        number = number * _MICROBATCHES + self.microbatch % _MICROBATCHES
        return number * _CHECKS + number % _PRIME


def compared(number: int) -> int:
    """The part of a number that must be equal on all ranks of a launch."""
    return number // (_MICROBATCHES * _CHECKS)


def is_whole(number: int) -> bool:
    """Whether this is a number that a rank has sent; false for a part of one, and for most other bytes."""
    rest, check = divmod(number, _CHECKS)
    return number > 0 and rest % _PRIME == check


class Difference(NamedTuple):
    """Two ranks, by number in the default group, with the different purposes of collectives that met."""

    rank: int
    number: int
    other_rank: int
    other_number: int

    @staticmethod
    def among(numbers: Sequence[int], ranks: Ranks, *, is_over: bool = False) -> Difference | None:
        """Finds the first rank and the first one that differs from it; None if all are equal.

        Args:
            numbers: one number a rank, in rank order; 0 if unknown.
            ranks: the ranks of the launch.
            is_over: whether an unknown number counts as a difference.
        """
        known = [index for index, number in enumerate(numbers) if number or is_over]
        for index in known[1:]:
            first = known[0]
            if compared(numbers[index]) != compared(numbers[first]):
                everyone = ranks.global_ranks
                return Difference(everyone[first], numbers[first], everyone[index], numbers[index])
        return None

    def message(self, model: ModelIdentity) -> str:
        """Says what happened and what to do.

        Args:
            model: model whose unit names the message uses.
        """
        numbers = self.number, self.other_number
        what, other = (described(number, model) for number in numbers)
        return (
            f"ranks do not do the same: rank {self.rank} {what}, while rank {self.other_rank} {other}. "
            f"{_ADVICE_ON_SIZES if all(map(_is_of_sizes, numbers)) else _ADVICE}"
        )


_ADVICE = (
    "All ranks have to use the same units in the same order, and to call together whatever is collective: "
    "evaluations, state_dict(), summon_full_params(), clip_grad_norm_(). To leave out a unit on some ranks "
    "only, call it everywhere and let it return its input there."
)
_ADVICE_ON_SIZES = "Ranks that share layers (tensor parallelism) have to be given the same tensors."


def _is_of_sizes(number: int) -> bool:
    return compared(number) // (_STEPS * _UNITS * _MODELS) in (Action.INPUTS, Action.EXCHANGE)


def described(number: int, model: ModelIdentity) -> str:
    """A number that has travelled, in words.

    Args:
        model: model whose unit names the message uses.
    """
    rest, microbatch = divmod(number // _CHECKS, _MICROBATCHES)
    rest, step = divmod(rest, _STEPS)
    rest, unit = divmod(rest, _UNITS)
    action, model_number = divmod(rest, _MODELS)
    if not is_whole(number) or action not in list(Action):
        # NCCL has put something else here: its launches run by size, so numbers meet payloads.
        return "does something of another size"
    names = model.units if model_number == model.number % _MODELS else ()
    name = f"unit {names[unit]}" if unit < len(names) else f"unit {unit} of another model"
    words = Action(action).words.format(unit=name, elements=unit * _STEPS + step)
    return words if action in _BETWEEN_STEPS else f"{words} (step {step}, microbatch {microbatch})"
