"""`FlatBuffer`: memory that comes and goes, behind a tensor and views of it that stay.

Next: `group.py` fills it by an all-gather, and frees it after use.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FlatBuffer:
    """A flat tensor whose memory comes and goes while the tensor, and every view of it, stays.

    Autograd saves such views for backward.  They are valid again once the memory is back and filled.  Views
    can only be made while there is memory, so the buffer starts with some.

    Args:
        numel: length in elements.
        poison: debug mode: the memory stays and holds NaN whenever it would be free, so that a read too early
            or too late gets NaN instead of stale values or a crash.

    Attributes:
        stays: whether the memory is kept for good, see `stay`.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, poison: bool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._poison = poison
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.stays = False

    def stay(self) -> None:
        """Keeps the memory for good, at one address."""
        self.stays = True
        self.allocate()

    def allocate(self) -> None:
        """Allocates memory with undefined contents; does nothing if there is some."""
        # The storage is resized, not replaced: views that autograd has saved have this one.
        if not self._storage.nbytes():
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Frees the memory."""
        # Only compute that reads too early or too late finds the NaN; whoever fills the buffer overwrites it.
        if self._poison:
            self.tensor.fill_(torch.nan)
        elif not self.stays:
            self._storage.resize_(0)

    def alias(self) -> Tensor:
        """Alias of the tensor with its own version counter, so that filling the buffer does not change it."""
        return self.tensor.data
