"""Tests that run on several ranks, in pools that live for the whole run: one test costs milliseconds.

Each file of tests has a process group of its own, see `end_groups`.

A test that runs on each of two ranks, inside an initialised process group, and asserts there:

    @pytest.mark.parametrize("reshard", [True, False])
    @on_ranks(2)
    def test_clipping(rank: int, world_size: int, reshard: bool) -> None: ...

Where the results of ranks are compared, or several tests share a case, `run_ranks(4, case, *args)` calls
`case(rank, 4, *args)` on each of four and returns their results in rank order.

What ranks run are top-level functions of a test module, which they import, and arguments are pickled.  An
exception on any rank fails the test with the tracebacks of all; ranks that are still in a collective then, or
that do not answer in time, are killed and the next call starts a fresh pool.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from flatfsdp.comm.launch import take_gpu
from tests.support.programs import forking

_POOLS: dict[tuple[int, str], Pool] = {}
_CACHED: list[Any] = []


class RankFailure(AssertionError):  # noqa: N818 - a failed assertion, on some rank
    """At least one rank raised; `errors` holds each rank's traceback, or None."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        ranks: dict[str, list[str]] = {}
        for rank, error in enumerate(errors):
            if error:
                ranks.setdefault(error, []).append(str(rank))
        super().__init__("\n".join(f"--- rank {', '.join(r)} ---\n{error}" for error, r in ranks.items()))


Test = Callable[..., None]
Cached = TypeVar("Cached", bound=Callable[..., Any])


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Test], Test]:
    """Runs a test on every rank of a process group, with its fixtures and parameters.

    The test is given its `rank` and the `world_size` if it has parameters of these names.

    Args:
        world_sizes: several make a test each; none leaves `world_size` to the test's own parametrization.
        options: those of `run_ranks`.
    """

    def decorated(test: Test) -> Test:
        case = _Body(test.__module__, test.__qualname__, frozenset(inspect.signature(test).parameters))
        asked = case.parameters - {"rank", "world_size"}
        if len(world_sizes) != 1:
            asked |= {"world_size"}

        @functools.wraps(test)
        def launch(**arguments: Any) -> None:
            world_size = arguments.pop("world_size", None) or world_sizes[0]
            try:
                run_ranks(world_size, case, arguments, **options)
            except RankFailure as failure:
                # Only what happened on the ranks; the way there is the same for all tests.
                raise pytest.fail.Exception(str(failure), pytrace=False) from None

        # What pytest gives the launcher.
        launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(asked)]
        )
        if len(world_sizes) > 1:
            return pytest.mark.parametrize("world_size", world_sizes)(launch)
        return launch

    return decorated


@dataclass(frozen=True)
class _Body:
    """The function under `on_ranks`, which a rank finds by the name that now is the launcher's."""

    module: str
    name: str
    parameters: frozenset[str]

    def __call__(self, rank: int, world_size: int, arguments: dict[str, Any]) -> None:
        test = getattr(importlib.import_module(self.module), self.name).__wrapped__
        given = {"rank": rank, "world_size": world_size}
        test(**{name: given[name] for name in self.parameters & given.keys()}, **arguments)


def run_ranks(
    world_size: int,
    case: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = 120.0,
    patience: float = 30.0,
) -> list[Any]:
    """With `backend="nccl"` each rank has a GPU as current device, which ranks share if there are too few.

    Args:
        timeout: seconds that the case may take.
        patience: seconds that a collective waits for other ranks.
    """
    key = (world_size, backend)
    if key not in _POOLS:
        _POOLS[key] = Pool(world_size, backend, patience)
    try:
        _POOLS[key].begin_group(patience)
        return _POOLS[key].run(case, args, timeout)
    except BaseException:
        _POOLS.pop(key).stop()
        raise


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has.  Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def end_groups() -> None:
    """Ends all process groups on ranks, which live on, and what tests have changed there.

    Ranks that wait take time, too: every gloo group that tests have made wakes up 100 times a second.
    """
    for key, pool in list(_POOLS.items()):
        try:
            pool.end_group()
        except RankFailure:
            _POOLS.pop(key).stop()


def cached_in_file(function: Cached) -> Cached:
    """`functools.cache` for what has process groups, a mesh, say: the next file makes its own."""
    _CACHED.append(functools.cache(function))
    return _CACHED[-1]


def stop_pools() -> None:
    """Ends all ranks; for cases that leave something behind that `end_groups` cannot undo."""
    while _POOLS:
        _POOLS.popitem()[1].stop()


class Pool:
    def __init__(self, world_size: int, backend: str, patience: float) -> None:
        context = forking()
        # Ranks that are killed leave it behind, so `stop` removes it.
        self._folder = tempfile.TemporaryDirectory(prefix="flatfsdp-ranks-")
        self._backend = backend
        self._groups = 0
        self._patience: float | None = None
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.begin_group(patience)

    def begin_group(self, patience: float) -> None:
        """Makes the default process group, unless there is one whose collectives wait as long."""
        if self._patience == patience:
            return
        self.end_group()
        self._groups += 1
        store = f"{self._folder.name}/store{self._groups}"
        self.run(_begin_group, (self._backend, store, patience), timeout=60.0)
        self._patience = patience

    def end_group(self) -> None:
        if self._patience is not None:
            self.run(_end_group, (), timeout=60.0)
            self._patience = None

    def run(self, case: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self._pipes:
            with suppress(ConnectionError):  # of a rank that has died, which is found out below
                pipe.send((case, args))
        results: list[Any] = [None] * len(self._pipes)
        errors: list[str | None] = [None] * len(self._pipes)
        deadline = time.monotonic() + timeout
        for rank, pipe in enumerate(self._pipes):
            # Once one rank has failed, the others get a moment to fail too, not the whole time limit.
            patience = 15.0 if any(errors) else deadline - time.monotonic()
            if not pipe.poll(max(patience, 0.0)):
                errors[rank] = "no answer in time (stuck in a collective?)"
                continue
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionError):
                errors[rank] = "the process died"
                continue
            if ok:
                results[rank] = value
            else:
                errors[rank] = value
        if any(errors):
            raise RankFailure(errors)
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, world_size: int, backend: str) -> None:
    torch.set_num_threads(1)
    # What the fork server has imported stays for good: no collection, and no test, needs to look at it.
    gc.freeze()
    _explain_assertions()
    if backend == "nccl":
        # cuBLAS reads it when CUDA starts; `repeatable` in `models.py` needs it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        take_gpu(rank)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            return
        try:
            result = case(rank, world_size, *args)
            pipe.send((True, result))
        except BaseException as error:  # pytest.fail raises one
            pipe.send((False, _traceback(error)))
        # Else the next case begins with tensors of this one.
        case = args = result = None


def _begin_group(rank: int, world_size: int, backend: str, store: str, patience: float) -> None:
    limit = timedelta(seconds=patience)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit
    )
    # Groups that a case makes, those of a mesh, say, would wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = limit
    # Models that a test builds without a seed are the same on all ranks.
    torch.manual_seed(0)


def _end_group(rank: int, world_size: int) -> None:
    """All groups, the default one and those of meshes; compiled code and leftovers."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    for function in _CACHED:
        function.cache_clear()
    gc.collect()
    # Test modules, and what they have imported, stay as well.
    gc.freeze()


def _explain_assertions() -> None:
    """Assertions of test modules that this rank imports show their values, as in pytest's own process."""
    install_importhook(get_config())


def _traceback(error: BaseException) -> str:
    """Without the frames of this file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))
