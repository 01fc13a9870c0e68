"""Before torch starts and any kernel is defined.

One thread, also in programs that tests start: tests compute on tiny tensors and run beside each other, so
more would only wait for each other.  Without a GPU, Triton kernels run in the interpreter.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.support.selection import PassedKernels, one_case_a_pair

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    collect_ignore = ["gpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "also those that are left out otherwise, see tests/support/selection.py"
    parser.addoption("--all-tests", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    # A plugin: in the process that the reports of all others reach, it keeps what has passed.
    config.pluginmanager.register(PassedKernels(config))
    _take_a_core()


def _take_a_core() -> None:
    """Keeps a test process, and the ranks that it starts, on one core if test processes fill the machine.

    Ranks that wake each other on other cores take a fifth more time than on one, and more again where each
    that wakes up interrupts the one that woke it.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    cores = sorted(os.sched_getaffinity(0))
    if worker and int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-tests"):
        kept = one_case_a_pair(items)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


def pytest_collection_finish() -> None:
    """Modules that are imported by now stay for good: collections of garbage need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports modules of `benchmarks/`, whose folder is on the path during the test."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module


@pytest.fixture(scope="module", autouse=True)
def _own_groups() -> Iterator[None]:
    """Each file has process groups of its own, on ranks that live for the whole run."""
    yield
    if "tests.support.ranks" in sys.modules:
        sys.modules["tests.support.ranks"].end_groups()


@pytest.fixture
def policy(flag: bool, reshard: bool) -> dict[str, Any]:
    """See `each_policy` of `tests/support/models.py`; what is freed too early reads as NaN."""
    from flatfsdp import Debug

    debug = Debug(poison_on_free=True)
    return {"optimize_backward_concat": flag, "reshard_after_forward": reshard, "debug": debug}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints each failure as it comes: a run may be cut off before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)
