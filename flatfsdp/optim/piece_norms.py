"""`PieceNorms`: norms of gradients that have the same bits on any number of ranks.

In:   gradients of flat shards that have `Pieces` (`contract/flat_shard.py`), as those of models with lanes.
Out:  the norm of every piece of each whole buffer, the same vector on all ranks.
Next: `clip.py` takes the norm of these norms, and `engine/storage/grad_norms.py` that of each parameter.

    buffer    | slot 0 .....|gap| slot 1 .....................................|gap|slot 2.|   |
    4 parts   |                   |                   |                   |                   |
    pieces    | 0 ..........|   |1| 2 ................| 3 ................| 4 |   | 5 ....|
    2 ranks   |<------------------------------------->|<------------------------------------->|

Shards are whole numbers of parts, so each piece is on one rank, at any number of ranks.  All ranks, and a
single one, too, combine the same numbers in the same order.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_reduce
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.flat_shard import GradAt, Gradients, Numbered, Range


class InPieces(NamedTuple):
    """A gradient that is sharded: of a whole buffer, or of one slot.

    Attributes:
        bounds: ranges of its pieces in the buffer, ascending, on whichever ranks they are.
        ranks: ranks that the buffer is sharded over.
        grads: what this rank has of it, at places in the buffer; whole pieces, and zeros between them.
    """

    bounds: Sequence[Range]
    ranks: Ranks
    grads: list[GradAt]

    def slices(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yields neighbouring pieces that this rank has, with the number of their first one."""
        for start, grad in sorted(self.grads, key=lambda each: each.start):
            stop = start + grad.numel()
            first, last = (bisect_left(self.bounds, (edge,)) for edge in (start, stop))
            # What is between two pieces, and a piece, in turn.
            edges = [start, *(edge for both in self.bounds[first:last] for edge in both), stop]
            if first < last:
                yield first, grad.split_with_sizes([b - a for a, b in pairwise(edges)])[1::2]


def of_buffers(gradients: Gradients) -> list[InPieces]:
    """One gradient for each buffer that has pieces, in the order of the buffers in their model."""
    found: dict[Numbered, InPieces] = {}
    for shard, grads in gradients:
        if (pieces := shard.pieces) is not None:
            whole = found.setdefault(pieces.buffer, InPieces(pieces.bounds, shard.grid.shard, []))
            whole.grads.extend(GradAt(pieces.start + start, grad) for start, grad in grads)
    # Not in the order of the shards, which depends on an optimizer's parameter groups.
    return [found[buffer] for buffer in sorted(found, key=lambda each: each.number)]


class PieceNorms:
    """Norms of the pieces of some gradients.

    Args:
        gradients: the gradients, in the same order on all ranks.
        dtype: dtype of the norms.
        device: device to communicate on.
        norm_type: order of the norms.
    """

    def __init__(
        self, gradients: Sequence[InPieces], dtype: torch.dtype, device: torch.device, norm_type: float
    ) -> None:
        self._gradients = gradients
        self._dtype, self._device, self._norm_type = dtype, device, norm_type
        self._numbers: dict[Ranks, list[int]] = {}
        for number, each in enumerate(gradients):
            self._numbers.setdefault(each.ranks, []).append(number)
        self._local = {
            ranks: self._local_norms([gradients[number] for number in numbers])
            for ranks, numbers in self._numbers.items()
        }

    @property
    def largest(self) -> list[Tensor]:
        """The largest norm on this rank, NaN above all, for each group of ranks that share gradients."""
        return [norms.amax() for norms in self._local.values()]

    def over_ranks(self, identity: Identity | None, bad: Sequence[Tensor] = ()) -> list[Tensor]:
        """For each gradient, the norms of all its pieces, on all ranks.  Collective.

        Args:
            identity: what the collectives carry.
            bad: numbers to be shared with all ranks, each zero, infinite or NaN.
        """
        found: dict[int, Tensor] = {}
        for ranks, norms in self._local.items():
            everyones = functools.reduce(torch.add, bad, norms)
            if ranks.size > 1:
                # Exact in any order: to each number all ranks but one add zero.
                with launch(ranks, identity, self._device):
                    all_reduce(everyones, ranks, mean=False)
            numbers = self._numbers[ranks]
            lengths = [len(self._gradients[number].bounds) for number in numbers]
            found.update(zip(numbers, everyones.split_with_sizes(lengths), strict=True))
        return [found[number] for number in range(len(found))]

    def _local_norms(self, gradients: Sequence[InPieces]) -> Tensor:
        """Norms of all pieces, 1-D, on the device; zero where other ranks have the piece, or no rank."""
        runs: list[tuple[int, Sequence[Tensor]]] = []
        length = 0
        for each in gradients:
            runs += [(length + first, slices) for first, slices in each.slices()]
            length += len(each.bounds)
        zeros = torch.zeros(length, dtype=self._dtype, device=self._device)
        parts, done = [], 0
        for (first, slices), norms in zip(runs, self._norms([slices for _, slices in runs]), strict=True):
            parts += [zeros[done:first], norms]
            done = first + len(slices)
        return torch.cat([*parts, zeros[done:]])

    def _norms(self, runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Norms of the slices of each run, 1-D, on the device."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, slices in enumerate(runs):
            by_kind.setdefault((slices[0].device, slices[0].dtype), []).append(number)
        found: dict[int, Tensor] = {}
        # Apart, because PyTorch has another kernel for lists of several dtypes, with another order, and which
        # dtypes a rank has depends on the number of ranks.
        for numbers in by_kind.values():
            slices = [
                # Some norms of an empty tensor are not zero.
                each if each.numel() else each.new_zeros(1)
                for number in numbers
                for each in runs[number]
            ]
            norms = torch.stack(torch._foreach_norm(slices, self._norm_type, dtype=self._dtype))
            parts = norms.to(self._device).split_with_sizes([len(runs[number]) for number in numbers])
            found.update(zip(numbers, parts, strict=True))
        return [found[number] for number in range(len(runs))]
