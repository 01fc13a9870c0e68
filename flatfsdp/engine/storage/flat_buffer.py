"""`FlatBuffer`: memory that comes and goes, behind a tensor and views of it that stay.

Next: `group.py` fills it by an all-gather, and frees it after use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.torch_private import shares_memory


class FlatBuffer:
    """A flat tensor whose memory comes and goes while the tensor, and every view of it, stays.

    What autograd saved for backward are such views, so they are valid again once the memory is back and
    filled.  Views can only be made while there is memory, so it starts with some.

    Args:
        numel: length in elements.
        poison: debug mode: the memory stays and holds NaN whenever it would be free, so that whoever
            reads too early or too late gets NaN instead of stale numbers or a crash.

    Attributes:
        stays: whether the memory is there for good, see `stay`.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._poison = poison
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.is_allocated = True
        self.stays = False

    def stay(self) -> None:
        """From now on the memory is never given back: what has been recorded reads and writes it."""
        self.stays = True
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)

    def allocate(self) -> None:
        """Gets memory, with undefined contents; nothing if it has some."""
        if not self.is_allocated:
            if not self._storage.nbytes():
                self._storage.resize_(self._nbytes)
            self.is_allocated = True

    def free(self) -> None:
        """Gives the memory back."""
        if self._poison:
            self.tensor.fill_(torch.nan)
        elif not self.stays:
            self._storage.resize_(0)
        self.is_allocated = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in this memory, which is there now; a detached view is, too."""
        return shares_memory(tensor, self._storage)

    def alias(self) -> Tensor:
        """The same memory with its own version counter, so that filling the buffer is no change to it."""
        return self.tensor.data
