"""Fewer cases than a product has, with the same pairs: a covering array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Fourth = TypeVar("Fourth")


def covering(
    firsts: Sequence[First], seconds: Sequence[Second], thirds: Sequence[Third], fourths: Sequence[Fourth]
) -> Iterator[tuple[First, Second, Third, Fourth]]:
    """Each first with every pair of the others' values; with as many firsts as `fourths`, all triples, too.

    For each first there is one case a pair of second and third, whose fourth goes round, so that it meets all
    seconds and all thirds.  It begins elsewhere for the next first.

    Raises:
        ValueError: if there are more fourths than seconds or thirds, which they could not all meet.
    """
    if len(fourths) > min(len(seconds), len(thirds)):
        raise ValueError(f"{len(fourths)} values do not meet all of {len(seconds)} and {len(thirds)}")
    for i, first in enumerate(firsts):
        for j, second in enumerate(seconds):
            for k, third in enumerate(thirds):
                yield first, second, third, fourths[(i + j + k) % len(fourths)]
