"""`CheckpointManager`: a run goes on from the newest checkpoint that is whole, and no NaN takes its place."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flatfsdp import FlatFSDP
from flatfsdp.checkpoint import CheckpointManager, DamagedCheckpoint
from tests.support.checkpoints import adamw, equal, full_state, step, wrapped
from tests.support.ranks import on_ranks


def damage(path: Path) -> None:
    """Flips one bit in the middle of the largest file."""
    file = max((each for each in path.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def after(steps: int, seed: int = 0) -> tuple[FlatFSDP, torch.optim.Optimizer]:
    model = wrapped(seed)
    optimizer = adamw(model, grouped=False)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


@on_ranks(2)
def test_the_newest_that_is_whole_is_loaded(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path / "run")
    model, optimizer = after(0)
    assert manager.resume(model, optimizer) is None
    states = {}
    for number in range(1, 5):
        step(model, optimizer, number)
        assert manager.save(number, model, optimizer, {"number": number})
        states[number] = copy.deepcopy(full_state(model, optimizer))
    assert names(manager.folder) == ["step-00000003", "step-00000004"]

    model, optimizer = after(1, seed=1)
    assert manager.resume(model, optimizer) == (4, {"number": 4})
    assert equal(full_state(model, optimizer), states[4])

    dist.barrier()
    if rank == 0:
        damage(manager.path(4))
        # What a kill leaves in a save, and in the removal of an old checkpoint.
        (manager.folder / "step-00000007").mkdir()
        (manager.folder / "step-00000007" / "__0_0.distcp").touch()
    dist.barrier()
    model, optimizer = after(1, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.resume(model, optimizer) == (3, {"number": 3})
    said = [str(each.message) for each in caught if "going on from step 3" in str(each.message)]
    assert len(said) == (rank == 0)
    assert equal(full_state(model, optimizer), states[3])
    dist.barrier()
    assert names(manager.folder) == ["damaged-step-00000004", "step-00000003"]
    # As if the damaged one had never been.
    step(model, optimizer, 4)
    assert equal(full_state(model, optimizer), states[4])
    assert manager.save(4, model, optimizer)
    assert manager.resume(model, optimizer) == (4, {})


@on_ranks(2)
def test_only_damaged_ones_raise(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path)
    model, optimizer = after(1)
    for number in (1, 2):
        manager.save(number, model, optimizer)
    before = full_state(model, optimizer)
    if rank == 0:
        damage(manager.path(1))
        damage(manager.path(2))
    dist.barrier()
    with pytest.raises(
        DamagedCheckpoint, match=r"all 2 checkpoints .* are damaged; the newest: .*step-00000002"
    ):
        manager.resume(model, optimizer)
    assert equal(full_state(model, optimizer), before)
    assert names(manager.folder) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("what", ["weight", "moment"])
@on_ranks(2)
def test_nan_takes_no_place(tmp_path: Path, rank: int, what: str) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = after(1)
    assert manager.save(1, model, optimizer)
    if rank == 1:
        parameter = next(each for each in model.parameters() if each.requires_grad)
        number = parameter if what == "weight" else optimizer.state[parameter]["exp_avg_sq"]
        with torch.no_grad():
            number[3] = float("nan") if what == "weight" else float("inf")
    if rank == 0:
        with pytest.warns(UserWarning, match=r"step 2 is not saved: .* NaN or infinite"):
            assert not manager.save(2, model, optimizer)
    else:
        assert not manager.save(2, model, optimizer)
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)


def test_removal_that_was_stopped_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file to go is the one by which a checkpoint is known."""
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = after(1)
    manager.save(1, model, optimizer)
    monkeypatch.setattr("flatfsdp.checkpoint.manager.shutil.rmtree", _stop)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, model, optimizer)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert manager.resume(model, optimizer) == (2, {})
    assert names(tmp_path) == ["step-00000002"]


def _stop(path: Path) -> None:
    os.unlink(next(path.glob("__0_*")))
    raise KeyboardInterrupt
