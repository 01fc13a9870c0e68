"""`TrainingState`: the phases of an instance."""

from __future__ import annotations

from enum import Enum, auto


class TrainingState(Enum):
    """The phase of a `FullyShardedDataParallel` within a step (its `training_state`)."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    """A backward is running, and gradients of this instance are still missing."""
    BACKWARD_POST = auto()
    """A backward is running, and all gradients of this instance have landed."""
    SUMMON_FULL_PARAMS = auto()
