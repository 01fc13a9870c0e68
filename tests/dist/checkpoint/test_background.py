"""`CheckpointManager(async_save=True)`: a thread writes what `save` has copied, and its errors are raised."""

from __future__ import annotations

import copy
import errno
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp import shard
from flatfsdp.checkpoint import CheckpointError, CheckpointManager, Writer
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.owner import Owner
from tests.support.checkpoints import equal, full_state, names_in, step, trained
from tests.support.programs import run_program
from tests.support.ranks import on_ranks


def digests(folder: Path) -> dict[int, str | None]:
    """Digests of the data files of a checkpoint, by rank."""
    (manifest,) = folder.glob("manifest-*.json")
    files = json.loads(manifest.read_bytes())["files"]
    return {each["rank"]: each["sha256"] for name, each in files.items() if name.endswith(".distcp")}


@contextmanager
def held() -> Iterator[threading.Event]:
    """Inside, saves write no data before the event is set, or 20 s have passed."""
    write, may_write = Writer.write_data, threading.Event()

    def late(self: Writer, *args: Any) -> Any:
        may_write.wait(20)
        return write(self, *args)

    with mock.patch.object(Writer, "write_data", late):
        yield may_write


@contextmanager
def second_in_flight(folder: Path) -> Iterator[tuple[CheckpointManager, threading.Event]]:
    """A manager that keeps one step, has saved step 1, and waits for the event in its save of step 2."""
    model, optimizer = trained(1)
    manager = CheckpointManager(folder, keep=1, async_save=True)
    assert manager.save(1, model, optimizer)
    manager.wait()
    with held() as may_write:
        assert manager.save(2, model, optimizer)
        yield manager, may_write


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Inside, the second rank's disk is full."""
    error = OSError(errno.ENOSPC, "No space left on device", "its file")
    with mock.patch.object(Writer, "write_data", side_effect=error) if rank == 1 else nullcontext():
        yield


@on_ranks(2)
def test_what_is_written_is_the_state_at_the_call(tmp_path: Path) -> None:
    """The same bytes as a synchronous save, although weights, moments and options have changed meanwhile."""
    model, optimizer = trained(2)
    ema, extra = EMA(model), {"counts": torch.tensor([2])}
    assert CheckpointManager(tmp_path / "sync").save(2, model, optimizer, extra, ema=ema)
    saved = copy.deepcopy(full_state(model, optimizer))
    manager = CheckpointManager(tmp_path / "async", async_save=True)
    with held() as may_write:
        assert manager.save(2, model, optimizer, extra, ema=ema)
        assert not (manager.path(2) / ".metadata").exists()
        extra["counts"] += 1
        optimizer.param_groups[0]["lr"] = 1e-3
        step(model, optimizer, 2)
        ema.update()
        assert not equal(full_state(model, optimizer), saved)
        may_write.set()
        manager.wait()
    assert digests(manager.path(2)) == digests(tmp_path / "sync" / "step-00000002")
    # The copy of this save goes into the memory of the last one.
    step(model, optimizer, 3)
    assert manager.save(4, model, optimizer)
    expected = copy.deepcopy(full_state(model, optimizer))
    assert manager.resume(model, optimizer) == (4, {})
    assert equal(full_state(model, optimizer), expected)
    other, resumed = trained(0, seed=1)
    dist.barrier()
    manager = CheckpointManager(tmp_path / "sync")
    found = manager.resume(other, resumed)
    assert found is not None and found.extra == {"counts": torch.tensor([2])}
    assert equal(full_state(other, resumed), saved)


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(2)
def test_a_manager_without_digests(async_save: bool, tmp_path: Path) -> None:
    model, optimizer = trained(1)
    with CheckpointManager(tmp_path, async_save=async_save, digests=False) as manager:
        assert manager.save(1, model, optimizer)
    dist.barrier()
    assert digests(manager.path(1)) == {0: None, 1: None}
    assert manager.resume(model, optimizer) == (1, {})


@on_ranks(2)
def test_an_error_is_raised_by_the_next_call_on_all_ranks(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained(1)
    manager = CheckpointManager(tmp_path, async_save=True)
    assert manager.save(1, model, optimizer)
    what = r"the save of step {} has failed .* rank 1: No space left on device"

    def fails(number: int) -> None:
        manager.wait()
        with full_disk(rank):
            assert manager.save(number, model, optimizer)
            manager._background.join()

    fails(2)
    with pytest.raises(CheckpointError, match=what.format(2)):
        manager.save(3, model, optimizer)
    # Told once; and step 3 was not begun.
    manager.wait()
    assert manager.save(3, model, optimizer)
    fails(4)
    with pytest.raises(CheckpointError, match=what.format(4)):
        manager.resume(model, optimizer)
    fails(5)
    with pytest.raises(CheckpointError, match=what.format(5)), manager:
        pass
    fails(6)
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match=what.format(6)):
        manager.wait()
    assert manager.resume(model, optimizer) == (3, {})
    dist.barrier()
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]
    # Of what only one rank's thread knows, too.
    alone = mock.patch.object(CheckpointManager, "_remove_older", side_effect=RuntimeError("alone"))
    with alone if rank == 1 else nullcontext():
        assert manager.save(7, model, optimizer)
        manager._background.join()
    with pytest.raises(CheckpointError, match=r"the save of step 7 .* rank 1: RuntimeError: alone"):
        manager.wait()


@on_ranks(2)
def test_what_load_would_refuse_is_refused_at_once(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained(1)
    manager = CheckpointManager(tmp_path, async_save=True)
    with pytest.raises(TypeError, match="extra"):
        manager.save(1, model, optimizer, {"path": tmp_path if rank == 1 else 0})
    manager.wait()


@on_ranks(2)
def test_a_save_does_not_end_in_a_folder_that_another_run_has_taken(tmp_path: Path, rank: int) -> None:
    """The other one may be saving the same step."""
    with second_in_flight(tmp_path) as (manager, may_write):
        if rank == 0:
            Owner(tmp_path).require()
        may_write.set()
        with pytest.raises(CheckpointError, match=r"of step 2 has failed .* belongs to another run now"):
            manager.wait()
    assert CheckpointManager(tmp_path).resume(*trained(1)) == (1, {})


@on_ranks(2)
def test_older_ones_are_removed_after_the_commit(tmp_path: Path, rank: int) -> None:
    with second_in_flight(tmp_path) as (manager, may_write):
        assert (manager.path(1) / ".metadata").exists()
        may_write.set()
        # No call has to come for that.
        manager._background.join()
    dist.barrier()
    assert names_in(tmp_path) == ["step-00000002"]
    manager.wait()


@on_ranks(2)
def test_training_and_saving_communicate_at_once(tmp_path: Path, rank: int) -> None:
    """Each rank's thread is late in another step: over one communicator their collectives would meet."""
    model, optimizer = trained(1)
    expected, twin = trained(1)
    manager = CheckpointManager(tmp_path, keep=1, async_save=True)
    for number in range(1, 9):
        with held() as may_write:
            assert manager.save(number, model, optimizer)
            if number % 2 == rank:
                may_write.set()
            step(model, optimizer, number)
            may_write.set()
            manager.wait()
        step(expected, twin, number)
    assert equal(full_state(model, optimizer), full_state(expected, twin))


def test_one_rank_without_a_process_group(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    with CheckpointManager(tmp_path, async_save=True) as manager:
        assert manager.save(1, model, optimizer)
        saved = copy.deepcopy(full_state(model, optimizer))
        step(model, optimizer, 1)
    assert manager.resume(model, optimizer) == (1, {})
    assert equal(full_state(model, optimizer), saved)


ENDING = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from flatfsdp import shard
from flatfsdp.checkpoint import CheckpointManager, Writer

folder, how = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
manager = CheckpointManager(folder, keep=1, async_save=True)
model = shard(torch.nn.Linear(8, 8))
manager.save(1, model)
manager.wait()
write = Writer.write_data

def late(*each):
    Path(folder, f"writes-{rank}").touch()
    time.sleep(1)
    return write(*each)

Writer.write_data = late
manager.save(2, model)
while not Path(folder, f"writes-{rank}").exists():
    time.sleep(0.01)
if how == "raise" and rank == 1:
    with manager:
        raise ZeroDivisionError
if how == "terminate":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "destroy":
    del manager
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["raise", "return", "destroy", "terminate"])
def test_a_process_ends_while_a_save_is_in_flight(tmp_path: Path, how: str) -> None:
    """It ends after the save, or at once by a signal, which leaves the checkpoint before."""
    (tmp_path / "program.py").write_text(ENDING)
    start = time.monotonic()
    done = run_program(tmp_path / "program.py", tmp_path, how, ranks=2, timeout=60)
    assert time.monotonic() - start < 30
    assert (done.returncode == 0) == (how in ("return", "destroy")), done.stderr
    assert "has failed in the background" not in done.stderr, done.stderr
    expected = 1 if how == "terminate" else 2
    model = shard(torch.nn.Linear(8, 8))
    found = CheckpointManager(tmp_path).resume(model)
    assert found is not None and found.step == expected
    assert names_in(tmp_path) == ["program.py", f"step-0000000{expected}", "writes-0", "writes-1"]
