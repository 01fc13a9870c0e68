"""Names for process groups in fairscale's interface."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch.distributed as dist


class ProcessGroupName(str, Enum):
    """Values of `process_group_reduce_scatter`."""

    default = "default"
    """Reduce over the group that all-gathers: nothing overlaps."""
    reduce_scatter = "reduce_scatter"
    """Reduce over a separate communicator, as the engine always does."""


def check_reduce_scatter_group(group: Any) -> None:
    """Raises TypeError unless `group` is a ProcessGroupName, a process group, or a stand-in with a rank()."""
    is_name = isinstance(group, str) and group in [name.value for name in ProcessGroupName]
    if not is_name and not isinstance(group, dist.ProcessGroup) and not hasattr(group, "rank"):
        raise TypeError(
            f"process_group_reduce_scatter is {group!r}; pass a ProcessGroupName or a process group"
        )
