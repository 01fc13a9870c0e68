"""Checkpoints in an object store: whole or absent whatever fails or is killed, and the bytes of a disk's."""

from __future__ import annotations

import copy
import errno
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from flatfsdp import checkpoint
from flatfsdp.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpoint
from flatfsdp.checkpoint.store import place
from tests.support.checkpoints import equal, full_state, names_in, trained
from tests.support.faults.training import Run, left_behind
from tests.support.ranks import on_ranks


class Killed(BaseException):
    """The end of the process, as far as the store can tell."""


class Faulty(MemoryFileSystem):
    """A store in memory with a fault at one of the operations that change it; others are counted.

    Attributes:
        fault: "kill" before it, after which nothing reaches the store; "refused": it raises instead; "lost":
            it is done, and raises.
        at: number of that operation.
        done: operations so far.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in MemoryFileSystem
    fault, at, done = "", 0, 0

    @classmethod
    @contextmanager
    def operation(cls) -> Iterator[None]:
        cls.done += 1
        is_it = cls.done == cls.at
        if cls.fault == "kill" and cls.at <= cls.done:
            raise Killed
        if is_it and cls.fault == "refused":
            raise OSError(errno.EIO, "the network is down")
        yield
        if is_it and cls.fault == "lost":
            raise OSError(errno.EIO, "no answer")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **options)
        # Empty at first, as on the worst of stores.
        with self.operation():
            file = super()._open(path, mode, **options)
        if "data" not in options:
            file.close = partial(self._close, file)
        return file

    def _close(self, file: Any) -> None:
        del file.close
        with self.operation():
            file.close()

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        with self.operation():
            super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        with self.operation():
            super().rm_file(path)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        with self.operation():
            super().cp_file(path1, path2, **options)


fsspec.register_implementation("faulty", Faulty, clobber=True)
URL = "faulty://bucket/run"


def contents() -> dict[str, bytes]:
    return {key: file.getvalue() for key, file in Faulty.store.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 2), (2, 2)], ids=["next", "rollback", "same step"])
@pytest.mark.parametrize("fault", ["kill", "refused", "lost"])
def test_a_fault_at_each_operation(fault: str, first: int, second: int) -> None:
    """The old one or the new one is resumed, never a mixture; and the next save leaves nothing but itself."""
    run, other = Run(), Run(seed=1)
    run.train()
    numbers = sorted({1, first})
    Faulty.fault = ""
    Faulty.store.clear()

    def save(number: int) -> None:
        CheckpointManager(URL, keep=len(numbers)).save(number, run.model, run.optimizer, {"step": run.step})

    for number in numbers:
        save(number)
    before, old = contents(), run.digest()
    run.train()
    new = run.digest()
    Faulty.done, found = 0, []
    save(second)
    for at in range(1, Faulty.done + 2):
        Faulty.store.clear()
        for key, data in before.items():
            Faulty.store[key] = MemoryFile(None, key, data)
        Faulty.fault, Faulty.at, Faulty.done = fault, at, 0
        with suppress(Killed, CheckpointError):
            save(second)
        Faulty.fault = ""
        resumed = CheckpointManager(URL).resume(other.model, other.optimizer)
        assert resumed is not None, at
        other.step = resumed.extra["step"]
        found.append(other.digest())
        manager = CheckpointManager(URL, keep=1)
        manager.save(4, other.model, other.optimizer)
        kept = [name for name in names_in(manager.folder) if not name.startswith("abandoned-")]
        assert kept == ["step-00000004"] and left_behind(manager.path(4)) == []
    assert set(found) == {old, new} and found[-1] == new
    if fault == "kill":
        # The new one from one operation on.
        assert found == sorted(found, key=[old, new].index)


@pytest.mark.filterwarnings("ignore")
def test_a_store_that_cannot_be_reached_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(1)
    manager = CheckpointManager("memory://unreachable")
    manager.save(1, model, optimizer)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a library's own error")

    for name in ("info", "ls", "cat_file"):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, name, fails)
            with pytest.raises(CheckpointError, match="a library's own error") as raised:
                manager.resume(model, optimizer)
            # Which would be put aside.
            assert not isinstance(raised.value, DamagedCheckpoint)
    assert manager.resume(model, optimizer) == (1, {})


def digests(folder: Any) -> list[str]:
    """Digests of the data files, in the order of ranks."""
    (manifest,) = (path for path in folder.iterdir() if path.name.startswith("manifest-"))
    files = json.loads(manifest.read_bytes())["files"]
    return [each["sha256"] for name, each in sorted(files.items()) if name.startswith("__")]


@on_ranks(2)
def test_a_run_in_a_store(tmp_path: Path, rank: int) -> None:
    """The bytes of a disk's, the newest whole one, what is removed, and DCP's own reader and writer."""
    model, optimizer = trained(1)
    expected = copy.deepcopy(full_state(model, optimizer))
    manager = CheckpointManager(f"objects://{tmp_path}/run", async_save=True)
    checkpoint.save(tmp_path / "disk", model, optimizer)
    for number in (1, 2, 3):
        manager.save(number, model, optimizer, {"number": number})
    manager.wait()
    assert digests(manager.path(3)) == digests(tmp_path / "disk")
    dist.barrier()
    if rank == 0:
        data = next(path for path in manager.path(3).iterdir() if path.name.startswith("__1_"))
        data.write_bytes(data.read_bytes()[:-1] + b"!")
        (manager.path(1) / data.name).write_bytes(b"of a save that was killed")
    dist.barrier()
    other, resumed = trained(0, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert manager.resume(other, resumed) == (2, {"number": 2})
    assert equal(full_state(other, resumed), expected)
    dist.barrier()
    assert names_in(manager.folder) == ["damaged-step-00000003", "step-00000002"]
    dist.barrier()
    # A save removes the rests of earlier ones, too.
    (manager.path(1) / f"__{rank}_0123456789ab_0.distcp").write_bytes(b"of a save that was killed")
    dist.barrier()
    manager.save(4, model, optimizer)
    manager.wait()
    dist.barrier()
    assert not manager.path(1).exists() and manager.path(2).exists()
    # Others' readers and writers.
    state = {"model": checkpoint.sharded_state_dict(model)}
    whole = {name: value for name, value in expected["model"].items() if name.startswith("blocks")}
    read = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": read}, storage_reader=FsspecReader(str(manager.path(2))))
    assert equal(read, whole)
    dcp.save(state, storage_writer=FsspecWriter(f"file://{tmp_path}/theirs", overwrite=True))
    dist.barrier()
    other, resumed = trained(0, seed=2)
    checkpoint.load(f"objects://{tmp_path}/theirs", other)
    assert equal(full_state(other, resumed)["model"], expected["model"])


@on_ranks(2)
def test_ranks_with_different_stores(tmp_path: Path, rank: int) -> None:
    model, _ = trained(0)
    there = f"objects://{tmp_path}/run"
    checkpoint.save(there, model)
    for other in (f"objects://{tmp_path}/other", str(tmp_path)):
        with pytest.raises(
            ValueError, match=r"ranks were given different paths: rank 0 .*, rank 1 .*; pass one"
        ):
            checkpoint.load(there if rank else other, model)
        with pytest.raises(ValueError, match="ranks were given different paths"):
            CheckpointManager(there if rank else other).save(1, model)
    # Each process has a store of its own.
    with pytest.raises(CheckpointError, match="which rank 0 does not see; save to storage"):
        checkpoint.save("memory://run", model)
    assert not place("memory://run").exists()
    with pytest.raises(ValueError, match="and no folder in it"):
        place("memory://")
