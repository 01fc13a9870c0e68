"""The few private parts of PyTorch's autograd that the engine relies on, all in one place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def running_backward() -> int:
    """Number of the backward that runs in this thread, -1 if none; one inside another has its own."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd is running: a forward that runs now is a recomputation."""
    return running_backward() != -1


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the running backward is over, and drops it uncalled if that raises."""
    Variable._execution_engine.queue_callback(callback)
