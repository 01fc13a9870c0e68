"""The environment that a launcher gives a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """With what torchrun sets, by which Accelerate knows that there are several ranks."""
    from accelerate.state import AcceleratorState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, str(value))
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
