"""Runs one subtest of a foreign file on a rank, and says how it went.

In:   a file, the name of a test in it, the number of a subtest, and which engine the file gets.
Out:  an `Outcome`.  It never raises, so that ranks that have seen the same stay together for the next one.

A subtest is what a test hands to `run_subtests`, or one combination of `pytest.mark.parametrize`; a test
without either is one by itself.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import re
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import flatfsdp
from tests.foreign import fsdp2, megatron
from tests.foreign.source import RANKS, translate

Engine = Literal["shard", "fully_shard"]
Status = Literal["passed", "failed", "refused", "other interface", "skipped", "other ranks"]


@dataclass(frozen=True)
class Outcome:
    """How a subtest went on one rank.

    Attributes:
        why: the message and the place, unless it passed.
        subtest: its arguments, "" for a test without subtests.
        subtests: number of subtests of the test.
        ranks: number of ranks that it needs, if the status is "other ranks".
    """

    status: Status
    why: str = ""
    subtest: str = ""
    subtests: int = 1
    ranks: int = 0


def run_subtest(
    rank: int, world_size: int, file: str, test: str, index: int, engine: Engine, ranks: int
) -> Outcome:
    """Runs one subtest, on each rank.

    Args:
        ranks: number of ranks, as the file sees it: it may use fewer.
    """
    try:
        loaded = _load(file, engine, ranks)
    except unittest.SkipTest as error:
        return Outcome("skipped", str(error))
    except ImportError as error:
        return Outcome("skipped", f"{error}: the file is of another torch than {torch.__version__}")
    with fsdp2.instead() if engine == "shard" else nullcontext():
        if "." in test:
            return _run_method(loaded, test, index, engine)
        return _run_function(loaded, test, index, engine)


# ---- files ------------------------------------------------------------------------------------------------


@functools.cache
def _load(file: str, engine: Engine, ranks: int) -> types.ModuleType:
    translated = translate(Path(file), for_shard=engine == "shard")
    if translated.is_megatron and engine == "fully_shard":
        raise unittest.SkipTest("Megatron-FSDP runs on GPUs only")
    module = types.ModuleType(f"foreign_{Path(file).stem}_{engine}")
    sys.modules[module.__name__] = module  # for pickling, and for dataclasses
    module.__dict__.update({RANKS: ranks, "__file__": file})
    if translated.is_megatron:
        module.__dict__.update(megatron.NAMES)
    with _test_classes(ranks):
        exec(compile(translated.code, file, "exec"), module.__dict__)
    if engine == "shard" and not translated.is_megatron:
        there = fsdp2.NAMES.keys() & module.__dict__.keys()
        module.__dict__.update({name: fsdp2.NAMES[name] for name in there})
    return module


@contextmanager
def _test_classes(ranks: int) -> Iterator[None]:
    """Context in which the classes of PyTorch's tests are ours, which run on the ranks that are there."""
    if "expecttest" not in sys.modules:
        # PyTorch's test classes are made from its class, and these tests use nothing of it.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    class OnRanks(common_utils.TestCase):
        chosen = 0
        """Number of the subtest that runs; the others are counted."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.subtests: list[str] = []
            self.caught: BaseException | None = None

        @property
        def world_size(self) -> int:
            return ranks

        @property
        def rank(self) -> int:
            return dist.get_rank()

        @property
        def process_group(self) -> Any:
            return dist.group.WORLD

        @contextmanager
        def assertRaisesRegex(self, kind: Any, words: str) -> Iterator[None]:  # noqa: N802
            """An error with other words stays what it is, so that one of ours is seen to be a refusal."""
            try:
                yield
            except kind as error:
                if not re.search(words, str(error)):
                    raise
            else:
                raise AssertionError(f"no error: {words}")

        def run_subtests(
            self, config: dict[str, list[Any]], test: Callable[..., None], *args: Any, **kwargs: Any
        ) -> None:
            for values in itertools.product(*config.values()):
                arguments = dict(zip(config, values, strict=True))
                self.subtests.append(_described(arguments))
                if len(self.subtests) - 1 == self.chosen:
                    try:
                        test(*args, **kwargs, **arguments)
                    except BaseException as error:
                        # The test goes on, so that all subtests are counted.
                        self.caught = error

    def skip_if_lt_x_gpu(least: int, **_: Any) -> Callable[[Any], Any]:
        return unittest.skipIf(ranks < least, f"needs {least} ranks")

    def not_compiled(**_: Any) -> Callable[[Any], Any]:
        """For what runs a test again with parts of FSDP2 compiled."""
        return lambda test: test

    classes = dict.fromkeys(("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous"), OnRanks)
    compiling = dict.fromkeys(("compiled_fsdp_test", "test_compiled_fsdp"), not_compiled)
    with (
        patch.multiple(common_fsdp, create=True, **classes, **compiling),
        patch.multiple(common_distributed, skip_if_lt_x_gpu=skip_if_lt_x_gpu),
    ):
        yield


# ---- runs -------------------------------------------------------------------------------------------------


def _run_method(module: types.ModuleType, test: str, index: int, engine: Engine) -> Outcome:
    of_class, _, name = test.partition(".")
    case = getattr(module, of_class)(name)
    if case.world_size != dist.get_world_size():
        return Outcome("other ranks", ranks=case.world_size)
    case.chosen = index
    outcome = _outcome(getattr(case, name), module.__file__, engine)
    if case.caught is not None:
        outcome = _failure(case.caught, module.__file__, engine)
    if not case.subtests:
        return outcome
    # There are fewer than for the other engine if the test has failed between two calls of `run_subtests`.
    return replace(outcome, subtest="".join(case.subtests[index : index + 1]), subtests=len(case.subtests))


def _run_function(module: types.ModuleType, test: str, index: int, engine: Engine) -> Outcome:
    function = getattr(module, test)
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    lists = [[_bound(mark.args[0], value) for value in mark.args[1]] for mark in reversed(marks)]
    combinations = [{k: v for each in one for k, v in each.items()} for one in itertools.product(*lists)]
    arguments = combinations[index]
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        fixtures = {
            "distributed_setup": types.SimpleNamespace(
                rank=dist.get_rank(), world_size=dist.get_world_size(), device=device
            ),
            "monkeypatch": monkeypatch,
        }
        used = {name: fixtures[name] for name in inspect.signature(function).parameters if name in fixtures}
        outcome = _outcome(functools.partial(function, **used, **arguments), module.__file__, engine)
    return replace(outcome, subtest=_described(arguments), subtests=len(combinations))


def _bound(names: str, value: Any) -> dict[str, Any]:
    split = [name.strip() for name in names.split(",")]
    return {split[0]: value} if len(split) == 1 else dict(zip(split, value, strict=True))


def _described(arguments: dict[str, Any]) -> str:
    shown = ((name, getattr(value, "__name__", None) or str(value)) for name, value in arguments.items())
    return ", ".join(f"{name}={value}" for name, value in shown)


# ---- outcomes ---------------------------------------------------------------------------------------------


def _outcome(run: Callable[[], None], file: str | None, engine: Engine) -> Outcome:
    try:
        run()
    except BaseException as error:  # pytest.skip raises one
        return _failure(error, file, engine)
    return Outcome("passed")


def _failure(error: BaseException, file: str | None, engine: Engine) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == file]
    where = f"line {theirs[-1].lineno}" if theirs else "before its first line"
    statement = f" {_statement(theirs[-1])}:" if theirs and isinstance(error, AssertionError) else ""
    return Outcome(_status(error, theirs, engine), f"{where}:{statement} {type(error).__name__}: {error}")


def _status(error: BaseException, theirs: list[traceback.FrameSummary], engine: Engine) -> Status:
    if isinstance(error, (unittest.SkipTest, pytest.skip.Exception)) or NEEDS_GPU.search(str(error)):
        return "skipped"
    if engine == "fully_shard":
        return "failed"
    if isinstance(error, megatron.NoCounterpart) or _is_refusal(error):
        return "refused"
    if isinstance(error, AttributeError) and error.name in _other_names():
        return "other interface"
    if isinstance(error, AssertionError) and theirs and LOOKS_INSIDE.search(_statement(theirs[-1])):
        return "other interface"
    return "failed"


NEEDS_GPU = re.compile(r"not compiled with CUDA|'_cuda|dummy base class|access accelerator device")
"""What torch says without a GPU: of streams, events, pinned memory, ..."""
LOOKS_INSIDE = re.compile(r"\bDTensor\b")
"""In an assertion: it is about the class of a parameter."""
OF_MEGATRON = {"parameter_groups", "phase", "Phase", "is_last_microbatch"}


def _is_refusal(error: BaseException) -> bool:
    """Whether a `raise` in our package has raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if not last or not Path(last[0].filename).is_relative_to(Path(flatfsdp.__file__).parent):
        return False
    return linecache.getline(last[0].filename, last[0].lineno or 0).lstrip().startswith("raise ")


@functools.cache
def _other_names() -> set[str]:
    """What DTensors and FSDP2's modules have, and ordinary tensors and modules have not."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    theirs = {*dir(DTensor), *dir(FSDPModule), "state", *OF_MEGATRON}
    return theirs - set(dir(torch.Tensor)) - set(dir(torch.nn.Module))


def _statement(frame: traceback.FrameSummary) -> str:
    """Its source, in one line."""
    first = frame.lineno or 0
    last = getattr(frame, "end_lineno", None) or first
    lines = (linecache.getline(frame.filename, line) for line in range(first, last + 1))
    return " ".join("".join(lines).split())
