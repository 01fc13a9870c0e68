"""`DerivedWeights`: what layers make of gathered weights, such as FP8 copies, and autograd saves.

In:   such copies, and how each is made again.
Out:  they are freed with the parameters, and are there again, with the same bits, in the backward.
Next: `unit.py` says when; `compat/sharded/transformer_engine.py` finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class DerivedWeights:
    """The copies that graphs of one unit's forwards have saved."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def add(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        """Adds what one forward has made of one weight.

        Args:
            tensors: what autograd may save; only weak references are kept.
            again: makes tensors with the same contents from the gathered weight.
        """
        self._saved.append(_Saved(tensors, again))

    def free(self) -> None:
        """Frees the memory of what is still saved."""
        self._saved = [each for each in self._saved if each.is_alive]
        for each in self._saved:
            each.free()

    def restore(self) -> None:
        """Fills the freed ones with what they held; the weights are gathered."""
        for each in self._saved:
            each.restore()


class _Saved:
    """What one forward has made of one weight."""

    def __init__(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._again = again
        self._is_free = False

    @property
    def is_alive(self) -> bool:
        """Whether a graph may still need it."""
        return any(reference() is not None for reference in self._references)

    def free(self) -> None:
        for reference in self._references:
            if (tensor := reference()) is not None:
                # Autograd has saved the tensor, not its memory: `.data` changes this without a new version.
                tensor.data = tensor.new_empty(0)
        self._is_free = True

    @torch.no_grad()
    def restore(self) -> None:
        if not self._is_free or not self.is_alive:
            return
        for reference, value in zip(self._references, self._again(), strict=True):
            if (tensor := reference()) is not None:
                tensor.data = value
        self._is_free = False
