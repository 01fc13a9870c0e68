"""A run of elements of an N-dimensional tensor as rectangles, the form in which checkpoints name parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """`sizes` elements from `offsets` on, in each dimension; contiguous in memory from element `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop), in row-major order, as few contiguous boxes: at most 2 * dimensions - 1.

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
