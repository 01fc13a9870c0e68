"""`TrainingState`: what an instance is busy with."""

from __future__ import annotations

from enum import Enum, auto


class TrainingState(Enum):
    """Where in a step a `FullyShardedDataParallel` is; see its `training_state`."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    """A backward runs, and this instance awaits gradients of its own."""
    BACKWARD_POST = auto()
    """A backward runs, and all gradients of this instance have landed."""
    SUMMON_FULL_PARAMS = auto()
