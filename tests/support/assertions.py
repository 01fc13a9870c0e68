"""Assertions that tests of all kinds repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor


def assert_raises(
    error: Any, message: str, function: Callable[..., Any], /, *args: Any, **options: Any
) -> None:
    """Asserts that a call raises `error`, with words that match `message`; a row of a table of refusals."""
    with pytest.raises(error, match=message):
        function(*args, **options)


def assert_equal(*runs: Iterable[Tensor | None]) -> None:
    """Asserts that all runs have the same tensors, bit for bit, and None in the same places."""
    first, *others = (list(run) for run in runs)
    for other in others:
        assert len(first) == len(other)
        for place, (one, two) in enumerate(zip(first, other, strict=True)):
            assert (one is None) == (two is None), place
            assert one is None or torch.equal(one, two), place


def saved_by(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """What a function returns, and the tensors that autograd saves while it runs."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return function(*args, **options), found
