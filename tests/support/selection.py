"""Which tests `make test` leaves out; `make test-all` (`pytest --all-tests`) runs every one.

Cross products: of a test with three parameters or more, as many cases as have every pair of values.

Kernels: their tests depend on few files, which seldom change, and interpreting is slow.  A test that passed
with the same files and versions is skipped.  What passed is in pytest's cache; without it, all of them run.
"""

from __future__ import annotations

import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
KERNELS = "tests/kernels/"
OF_KERNELS = (
    *("kernels", "tests/kernels", "tests/support/kernels", "tests/support/gpu/waiting.py"),
    *("tests/support/assertions.py", "tests/support/plain_layers.py"),
)
"""Folders and files that the results of tests of kernels depend on."""
CACHE = "flatfsdp/kernels"

Pair = tuple[tuple[str, int], ...]


def one_case_a_pair(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items without the cases whose pairs of values all occur in others."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in tests.values() for item in _covering(cases)}
    return [item for item in items if item in kept]


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Takes, again and again, the first of those with the most pairs that no other has yet."""
    pairs = {case: _pairs(case) for case in cases}
    missing = set().union(*pairs.values())
    kept = []
    while missing:
        kept.append(max(pairs, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs.pop(kept[-1])
    return kept


def _pairs(case: pytest.Item) -> set[Pair]:
    # By identity: cases share the objects that they are parametrized with, which need not be hashable.
    call = getattr(case, "callspec", None)
    values = sorted((name, id(value)) for name, value in call.params.items()) if call else []
    return set(combinations(values, min(2, len(values))))


class PassedKernels:
    """A plugin that skips tests of kernels that have passed with the files and versions that are here."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = getattr(config, "cache", None)
        self._digest = _digest()
        found: dict[str, Any] = (self._cache.get(CACHE, None) if self._cache else None) or {}
        self.passed: set[str] = set(found["passed"]) if found.get("digest") == self._digest else set()
        self._new: set[str] = set()
        self._all_passed = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._config.getoption("--all-tests"):
            return
        reason = "passed with the same kernels, tests, torch and triton; make test-all runs it"
        for item in items:
            if item.nodeid in self.passed:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(KERNELS):
            self._all_passed &= not report.failed
            if report.when == "call" and report.passed:
                self._new.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Keeps what has passed, unless another test of a kernel has failed.

        With several test processes only the one that starts them does; the reports of all reach it.
        """
        if self._cache and self._new and self._all_passed and not hasattr(self._config, "workerinput"):
            passed = sorted(self.passed | self._new)
            self._cache.set(CACHE, {"digest": self._digest, "passed": passed})


def files_of_kernels() -> list[Path]:
    """The Python files among `OF_KERNELS`."""
    there = [ROOT / name for name in OF_KERNELS]
    within = [path for folder in there for path in folder.rglob("*.py")]
    return sorted([*within, *(path for path in there if path.is_file())])


def _digest() -> str:
    found = sha256()
    for path in files_of_kernels():
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    versions = (torch.__version__, triton, platform.python_version(), torch.cuda.is_available())
    found.update(str(versions).encode())
    return found.hexdigest()
