"""`CheckpointManager`: a run resumes from the newest whole checkpoint, and no NaN replaces it."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp import FlatFSDP
from flatfsdp.checkpoint import CheckpointManager, DamagedCheckpoint
from flatfsdp.checkpoint.manager import is_finite
from flatfsdp.checkpoint.manifest import data_prefix
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


def two_saved(folder: Path) -> tuple[CheckpointManager, FlatFSDP, torch.optim.Optimizer]:
    """Steps 1 and 2, of the same weights."""
    manager = CheckpointManager(folder)
    model, optimizer = after(1)
    for number in (1, 2):
        manager.save(number, model, optimizer)
    dist.barrier()
    return manager, model, optimizer


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
        (manager.folder / "step-00000007" / f"{data_prefix(0, '0123456789ab')}0.distcp").touch()
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
    manager, model, optimizer = two_saved(tmp_path)
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


@pytest.mark.parametrize("what", ["weight", "moment", "buffer"])
@on_ranks(2)
def test_nan_takes_no_place(tmp_path: Path, rank: int, what: str) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = after(1)
    assert manager.save(1, model, optimizer)
    if rank == 1:
        parameter = next(each for each in model.parameters() if each.requires_grad)
        number = {
            "weight": parameter,
            "moment": optimizer.state[parameter]["exp_avg_sq"],
            "buffer": model.module.count,
        }[what]
        with torch.no_grad():
            number[2] = float("inf") if what == "moment" else float("nan")
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
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = after(1)
    manager.save(1, model, optimizer)
    monkeypatch.setattr("flatfsdp.checkpoint.manager.shutil.rmtree", _stop)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, model, optimizer)
    monkeypatch.undo()
    assert names(tmp_path) == ["removed-step-00000001", "step-00000002"]
    assert manager.resume(model, optimizer) == (2, {})
    assert names(tmp_path) == ["step-00000002"]


def _stop(path: Path) -> None:
    os.unlink(next(path.glob("__0_*")))
    raise KeyboardInterrupt


@on_ranks(2)
def test_what_is_not_its_own_is_left_alone(tmp_path: Path, rank: int) -> None:
    manager, model, optimizer = two_saved(tmp_path)
    if rank == 0:
        # As tools that copy no hidden files do; and what other programs call so.
        (manager.path(2) / ".metadata").unlink()
        (tmp_path / "step-00000009").mkdir()
        (tmp_path / "step-00000009" / "model.pth").touch()
        (tmp_path / "step-00000010").touch()
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.resume(model, optimizer) == (1, {})
    said = " ".join(str(each.message) for each in caught)
    assert (rank == 0) == ("has lost its .metadata" in said and "step-00000009 is no checkpoint" in said)
    dist.barrier()
    kept = ["damaged-step-00000002", "step-00000001", "step-00000009", "step-00000010"]
    assert names(tmp_path) == kept
    assert names(tmp_path / "step-00000009") == ["model.pth"]


@on_ranks(2)
def test_tidying_that_fails_stops_nobody(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = after(1)
    manager.save(1, model, optimizer)
    refusal = PermissionError("it belongs to somebody else")
    with mock.patch("flatfsdp.checkpoint.manager.remove", side_effect=refusal):
        assert manager.save(2, model, optimizer)
    assert manager.resume(model, optimizer) == (2, {})


@on_ranks(2)
def test_a_rank_without_numbers_takes_part(tmp_path: Path, rank: int) -> None:
    model = FlatFSDP(torch.nn.Linear(1, 1, bias=False))
    assert is_finite(model)
