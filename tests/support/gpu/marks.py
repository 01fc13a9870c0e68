"""Marks that say which GPUs a test needs."""

from __future__ import annotations

import pytest
import torch

FP8_GEMMS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8 GEMMs",
    ),
]
