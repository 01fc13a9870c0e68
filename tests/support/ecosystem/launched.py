"""What a launcher, such as torchrun, gives a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """With the environment by which Accelerate knows that there are several ranks, and no Accelerator yet."""
    from accelerate.state import AcceleratorState, GradientState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict("os.environ", {name: str(value) for name, value in names.items()}):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
