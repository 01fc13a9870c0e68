"""Before torch starts and any kernel is defined.

One thread, also in programs that tests start: tests compute on tiny tensors and run beside each other, so
more would only wait for each other.  Without a GPU, Triton kernels run in the interpreter.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names each failure as it comes: a run may be cut off before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)
