"""Marks that say which GPUs a test needs.  Ranks share GPUs where there are too few, see `take_gpu`."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FP8_GEMMS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8 GEMMs",
    ),
]


def one_gpu_each(*world_sizes: int) -> pytest.MarkDecorator:
    """Parametrizes `world_size` for tests that need a GPU for each rank: of times, or of direct access."""
    gpus = torch.cuda.device_count()
    return pytest.mark.parametrize(
        "world_size",
        [
            pytest.param(n, marks=pytest.mark.skipif(gpus < n, reason=f"needs {n} CUDA devices"))
            for n in world_sizes
        ],
    )
