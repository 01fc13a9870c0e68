"""`FlatBuffer`: memory that comes and goes, behind a tensor and views of it that stay.

Next: `group.py` fills it by an all-gather, and frees it after use; `Placeholders` are what modules show while
      it is freed (`backward_concat.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.flat.layout import FlatLayout
from flatfsdp.torch_private import copied_on_write, is_copied_on_write, shares_memory


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


class Placeholders:
    """Placeholders for sharded parameters: their shapes, full of NaN, in the memory of one element.

    Printing a view of freed memory would crash the process.  The memory is copied on write: PyTorch gives it
    up at the first write to one of its tensors, through `.data` as well, which tells without reading a value.

    Attributes:
        tensors: the placeholders, in slot order.
    """

    def __init__(self, layout: FlatLayout, like: Tensor) -> None:
        self._shapes = [slot.shape for slot in layout.slots]
        self._nans = torch.full((len(self._shapes),), torch.nan, dtype=like.dtype, device=like.device)
        self.tensors = self._fresh()

    def _fresh(self) -> list[Tensor]:
        self._shared = copied_on_write(self._nans)
        # `.data` gives each a version counter of its own.
        return [nan.data.expand(shape) for nan, shape in zip(self._shared, self._shapes, strict=True)]

    def take_back(self, shown: Sequence[Tensor]) -> Sequence[int]:
        """Makes `shown` placeholders again if they no longer are; returns the slots that somebody changed.

        Args:
            shown: tensors that have the memory of the placeholders, in slot order.
        """
        if all(map(is_copied_on_write, shown)):
            return ()
        # `data_ptr()` and `numpy()` may write, for all that PyTorch knows; what they have read is NaN still.
        still_nan, memory = self._shared.isnan().tolist(), self._shared.untyped_storage()
        touched = [slot for slot, tensor in enumerate(shown) if not is_copied_on_write(tensor)]
        written = [slot for slot in touched if not (still_nan[slot] and shares_memory(shown[slot], memory))]
        for tensor, fresh in zip(self.tensors, self._fresh(), strict=True):
            tensor.data = fresh
        for tensor, absent in zip(shown, self.tensors, strict=True):
            tensor.data = absent
        return written
