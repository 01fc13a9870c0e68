"""Cuts a run of elements of an N-dimensional tensor into boxes, the form in which checkpoints name parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from flatfsdp.contract.placement import Partition


class Box(NamedTuple):
    """Box of `sizes` elements from `offsets` on; contiguous in memory from element `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields elements [start, stop), in row-major order, as at most 2 * dimensions - 1 contiguous boxes.

    . . . a a a
    b b b b b b      [3, 16) of a 4 x 6 tensor: the end of a row, whole rows, the beginning of a row
    c c c c . .
    . . . . . .
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    base = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), base + box.start)


def boxes_of_part(
    shape: Sequence[int], start: int, stop: int, partition: Partition | None, rank: int, count: int
) -> Iterator[Box]:
    """Yields boxes of one rank's part of a split tensor, at their places in the whole tensor; see `boxes`.

    Args:
        shape: shape of the part.
        start: first element of the run, in the part.
        stop: end of the run, in the part.
        partition: split of the whole tensor over `count` ranks; None if each of them has all of it.
        rank: the rank that has the part.
        count: number of ranks.
    """
    if partition is None:
        yield from boxes(shape, start, stop)
        return
    dim, cursor = partition.dim, 0
    runs = []
    for size, first in zip(partition.sizes, accumulate(partition.sizes, initial=0), strict=False):
        length = size // count
        runs.append((cursor, cursor + length, first + rank * length - cursor))
        cursor += length
    for box in boxes(shape, start, stop):
        for low, high, shift in runs:
            yield from _moved(box, dim, low, high, shift)


def _moved(box: Box, dim: int, low: int, high: int, shift: int) -> Iterator[Box]:
    """Yields the parts of a box in [low, high) of dimension `dim`, moved by `shift`."""
    begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    low, high = max(low, begin), min(high, end)
    if low >= high:
        return
    offsets = (*box.offsets[:dim], low + shift, *box.offsets[dim + 1 :])
    sizes = (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :])
    row = math.prod(box.sizes[dim + 1 :])
    if (low, high) == (begin, end):
        yield Box(offsets, sizes, box.start)
        return
    # Parts of several rows are not contiguous: one box a row.
    rows = product(*(range(size) for size in box.sizes[:dim]))
    for number, index in enumerate(rows):
        leading = tuple(offset + i for offset, i in zip(box.offsets, index, strict=False))
        yield Box(
            (*leading, *offsets[dim:]),
            (*(1 for _ in index), *sizes[dim:]),
            box.start + (number * box.sizes[dim] + low - begin) * row,
        )
