"""Kernels run on the GPU where there is one, else in Triton's interpreter, repaired."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import repair


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter() -> None:
    if not torch.cuda.is_available():
        repair()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where kernels can be launched."""
    return "cuda" if torch.cuda.is_available() else "cpu"
