"""What a launcher, such as torchrun, gives a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def trainer_options(**options: Any) -> dict[str, Any]:
    """Options of transformers' trainers on CPUs, which save nothing: small batches, two a step, many logs."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return {**quiet, **sizes, "logging_steps": 1, "learning_rate": 1e-2, **options}


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
