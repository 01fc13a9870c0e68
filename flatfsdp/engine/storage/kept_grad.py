"""`KeptGrad`: memory at one address for the reduced gradient of a group, in every step."""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.torch_private import uses_of_memory


class KeptGrad:
    """Memory that a group's reduced gradients take turns in.

    Args:
        master: master shard that the gradient is of.

    Attributes:
        tensor: the memory, 1-D, as long as the shard, in the dtype of the gradient.
    """

    def __init__(self, master: MasterShard) -> None:
        self._master = master
        self.tensor = torch.empty(master.flat.numel(), dtype=master.grad_dtype, device=master.device)
        # Counted before anybody else can have it.
        self._uses_if_free = uses_of_memory(self.tensor)

    @property
    def free_memory(self) -> Tensor | None:
        """The memory; None while a parameter, or a user, holds the gradient of an earlier step in it."""
        if self._master.grads or uses_of_memory(self.tensor) != self._uses_if_free:
            return None
        return self.tensor
