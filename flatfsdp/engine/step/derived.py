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

_Saved = tuple[list[weakref.ref[Tensor]], Callable[[], Sequence[Tensor]]]
"""What one forward has made of one weight, and what makes tensors with the same contents again."""


class DerivedWeights:
    """The copies that graphs of one unit's forwards have saved."""

    def __init__(self) -> None:
        self._there: list[_Saved] = []
        self._freed: list[_Saved] = []

    def add(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        """Adds what one forward has made of one weight.

        Args:
            tensors: what autograd may save; only weak references are kept.
            again: makes tensors with the same contents from the gathered weight.
        """
        self._there.append(([weakref.ref(tensor) for tensor in tensors], again))

    def free(self) -> None:
        """Frees the memory of what is still saved."""
        saved = self._freed + self._there
        if saved:
            self._freed, self._there = _alive(saved), []
        for references, _ in self._freed:
            for reference in references:
                if (tensor := reference()) is not None:
                    # Autograd has saved the tensor, not its memory, which `.data` changes uncounted.
                    tensor.data = tensor.new_empty(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Fills the freed ones with what they held; the weights are gathered."""
        saved, self._freed = _alive(self._freed), []
        for references, again in saved:
            for reference, value in zip(references, again(), strict=True):
                if (tensor := reference()) is not None:
                    tensor.data = value
        self._there += saved


def _alive(saved: list[_Saved]) -> list[_Saved]:
    """Those that a graph may still need."""
    return [each for each in saved if any(reference() is not None for reference in each[0])]
