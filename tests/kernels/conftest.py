"""Kernels run on the GPU if there is one, else in Triton's interpreter, repaired."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatfsdp.kernels.gemm import cublas_lt, gemm, wgrad
from tests.support.kernels.fake_cublas_lt import FakeCublasLt
from tests.support.kernels.interpreter import repair


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter() -> None:
    if not torch.cuda.is_available():
        repair()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """The device on which kernels can be launched."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fresh_choices() -> Iterator[None]:
    """Choices, handles and prepared GEMMs are kept per process; tests with this fixture make their own."""
    kept = (cublas_lt.prepared_matmul, cublas_lt._handle, cublas_lt.bindings)
    cached = [fn for fn in kept if hasattr(fn, "cache_clear")]
    for fn in cached:
        fn.cache_clear()
    yield
    for fn in cached:
        fn.cache_clear()


@pytest.fixture
def fake(fresh_choices: None, monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    """Replaces cuBLASLt for launches on the CPU; the public functions launch."""
    made = FakeCublasLt()
    monkeypatch.setattr(cublas_lt, "bindings", lambda: made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(wgrad, "_wgrad", wgrad.launch)
    monkeypatch.setattr(wgrad, "_wgrad_fp8", wgrad.launch_fp8)
    monkeypatch.setattr(gemm, "_scaled_mm", gemm.launch)
    return made
