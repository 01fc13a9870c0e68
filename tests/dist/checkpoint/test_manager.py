"""`CheckpointManager`: a run resumes from the newest whole checkpoint, and no NaN replaces it."""

from __future__ import annotations

import copy
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp import shard
from flatfsdp.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpoint, load
from flatfsdp.checkpoint.manager import largest_magnitudes
from flatfsdp.checkpoint.manifest import data_prefix
from flatfsdp.checkpoint.owner import FILE
from tests.support.checkpoints import equal, full_state, names_in, step, trained
from tests.support.ranks import on_ranks


def damage(path: Path) -> None:
    """Flips one bit in the middle of the largest file."""
    file = max((each for each in path.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def two_saved(folder: Path) -> tuple[CheckpointManager, Any, torch.optim.Optimizer]:
    """Steps 1 and 2, of the same weights."""
    manager = CheckpointManager(folder)
    model, optimizer = trained(1)
    for number in (1, 2):
        manager.save(number, model, optimizer)
    dist.barrier()
    return manager, model, optimizer


@on_ranks(2)
def test_the_newest_that_is_whole_is_loaded(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path / "run")
    model, optimizer = trained(0)
    assert manager.resume(model, optimizer) is None
    states = {}
    for number in range(1, 5):
        step(model, optimizer, number)
        assert manager.save(number, model, optimizer, {"number": number})
        states[number] = copy.deepcopy(full_state(model, optimizer))
    assert names_in(manager.folder) == ["step-00000003", "step-00000004"]

    model, optimizer = trained(1, seed=1)
    assert manager.resume(model, optimizer) == (4, {"number": 4})
    assert equal(full_state(model, optimizer), states[4])

    dist.barrier()
    if rank == 0:
        damage(manager.path(4))
        # What a kill leaves in a save, and in the removal of an old checkpoint.
        (manager.folder / "step-00000007").mkdir()
        (manager.folder / "step-00000007" / f"{data_prefix(0, '0123456789ab')}0.distcp").touch()
    dist.barrier()
    model, optimizer = trained(1, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.resume(model, optimizer) == (3, {"number": 3})
    said = [str(each.message) for each in caught if "going on from step 3" in str(each.message)]
    assert len(said) == (rank == 0)
    assert equal(full_state(model, optimizer), states[3])
    dist.barrier()
    assert names_in(manager.folder) == ["damaged-step-00000004", "step-00000003"]
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
    assert names_in(manager.folder) == ["step-00000001", "step-00000002"]


@contextmanager
def warning(rank: int, text: str) -> Iterator[None]:
    """Context that expects one warning, on the first rank alone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if each.category is UserWarning]
    assert [bool(re.search(text, each)) for each in said] == [True] * (rank == 0), said


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("weight", r"on rank 1, blocks\.1\.\S+ has a NaN;"),
        ("moment", r"on rank 1, exp_avg_sq of blocks\.1\.\S+ has an infinite number, and had none before"),
    ],
)
@on_ranks(2)
def test_nan_takes_no_place(tmp_path: Path, rank: int, what: str, text: str) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = trained(1)
    assert manager.save(1, model, optimizer)
    if rank == 1:
        parameter = dict(model.named_parameters())["blocks.1.down.weight"]
        with torch.no_grad():
            if what == "weight":
                parameter[2] = float("nan")
            else:
                optimizer.state[parameter]["exp_avg_sq"][2] = float("inf")
    with warning(rank, f"step 2 is not saved: {text}"):
        assert not manager.save(2, model, optimizer)
    assert names_in(tmp_path) == ["step-00000001"]


class Masked(torch.nn.Module):
    """A causal mask as in many tutorials, an observer that has seen nothing, a class that is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 6)
        self.head.bias.data[3] = -torch.inf
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))
        self.register_buffer("least", torch.tensor(torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x) + 0 * self.mask.exp().sum(), x.argmax(-1) * 0)


@pytest.mark.parametrize("resumes", [True, False])
@on_ranks(2)
def test_what_was_infinite_from_the_beginning_is_saved(tmp_path: Path, rank: int, resumes: bool) -> None:
    torch.manual_seed(0)
    model = shard(Masked())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = CheckpointManager(tmp_path)
    if resumes:
        assert manager.resume(model, optimizer) is None
    for number in (1, 2):
        loss = model(torch.randn(4, 6))
        loss.backward()
        assert loss.isfinite()
        optimizer.step()
        optimizer.zero_grad()
        assert manager.save(number, model, optimizer)
    before = full_state(model, optimizer)
    assert before["model"]["head.bias"][3] == -torch.inf
    manager = CheckpointManager(tmp_path)
    assert manager.resume(model, optimizer) == (2, {})
    assert equal(before["optimizer"], full_state(model, optimizer)["optimizer"])
    assert manager.save(3, model, optimizer)

    # A weight that was finite when it was resumed or saved is another matter.
    with torch.no_grad(), model.summon_full_params():
        model.head.weight[0, 0] = torch.inf
    with warning(rank, r"step 4 is not saved: on rank 0, head\.weight has an infinite number"):
        assert not manager.save(4, model, optimizer)


@on_ranks(2)
def test_a_run_that_was_rolled_back_goes_on_from_what_it_saved_last(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path, keep=3)
    model, optimizer = trained(1)
    for number in (100, 200, 300):
        step(model, optimizer, number)
        assert manager.save(number, model, optimizer)
    load(manager.path(100), model, optimizer)
    step(model, optimizer, 7)
    expected = copy.deepcopy(full_state(model, optimizer))
    aside = ["abandoned-step-00000200", "abandoned-step-00000300"]
    with warning(rank, rf"later steps than 150, .* put aside as {aside[0]}, {aside[1]}; give each run"):
        assert manager.save(150, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert CheckpointManager(tmp_path).resume(model, optimizer) == (150, {})
    assert equal(full_state(model, optimizer), expected)
    dist.barrier()
    assert names_in(tmp_path) == [*aside, "step-00000100", "step-00000150"]
    # What is put aside can be loaded, and the next of the same step does not replace it.
    load(tmp_path / aside[0], model, optimizer)
    assert manager.save(200, model, optimizer)
    assert manager.save(151, model, optimizer)
    assert names_in(tmp_path)[:2] == [aside[0], f"{aside[0]}.2"]
    load(tmp_path / aside[0], model, optimizer)


@on_ranks(2)
def test_a_new_run_in_the_folder_of_an_old_one(tmp_path: Path, rank: int) -> None:
    """It does not resume, as it should have, and the old run's checkpoints stay, though not in its way."""
    model, optimizer = trained(1)
    for number in (100, 200):
        CheckpointManager(tmp_path).save(number, model, optimizer)
    model, optimizer = trained(1, seed=1)
    manager = CheckpointManager(tmp_path)
    for number in (10, 20, 30):
        step(model, optimizer, number)
        with warning(rank, "give each run a folder of its own") if number == 10 else nullcontext():
            assert manager.save(number, model, optimizer)
    expected = copy.deepcopy(full_state(model, optimizer))
    assert CheckpointManager(tmp_path).resume(model, optimizer) == (30, {})
    assert equal(full_state(model, optimizer), expected)
    dist.barrier()
    asides = ["abandoned-step-00000100", "abandoned-step-00000200"]
    assert names_in(tmp_path) == [*asides, "step-00000020", "step-00000030"]


@on_ranks(2)
def test_of_two_runs_in_a_folder_the_one_that_began_last_goes_on(tmp_path: Path, rank: int) -> None:
    """A job may have been started again while ranks of its first start are left."""
    old, model, optimizer = two_saved(tmp_path)
    new = CheckpointManager(tmp_path)
    assert new.resume(model, optimizer) == (2, {})
    # To look is not to begin.
    assert old.save(3, model, optimizer)
    with warning(rank, "later steps than 2"):
        assert new.save(2, model, optimizer)
    dist.barrier()
    kept = names_in(tmp_path)
    whose = rf"belongs to another run now: process \d+ on {re.escape(socket.gethostname())}, since 20"
    with pytest.raises(CheckpointError, match=whose):
        old.save(4, model, optimizer)
    assert names_in(tmp_path) == kept
    assert new.save(3, model, optimizer)
    dist.barrier()
    # Whoever tidies up by hand stops nobody.
    if rank == 0:
        (tmp_path / FILE).unlink()
    assert new.save(4, model, optimizer)
    assert (tmp_path / FILE).exists()


@on_ranks(2)
def test_a_run_that_could_not_take_the_folder_tries_again(tmp_path: Path, rank: int) -> None:
    _, model, optimizer = two_saved(tmp_path)
    new = CheckpointManager(tmp_path)
    full = mock.patch("flatfsdp.checkpoint.durable.write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match="rank 0: No space left on device"):
        new.save(3, model, optimizer)
    assert new.save(3, model, optimizer)


@on_ranks(2)
def test_a_later_checkpoint_that_cannot_be_put_aside(tmp_path: Path, rank: int) -> None:
    """Nothing is saved then: the next resume would follow the later one."""
    manager, model, optimizer = two_saved(tmp_path)
    refusal = mock.patch.object(Path, "rename", side_effect=PermissionError(13, "Permission denied"))
    with refusal, pytest.raises(CheckpointError, match="rank 0: Permission denied"):
        manager.save(1, model, optimizer)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


@on_ranks(2)
def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path, rank: int) -> None:
    manager, model, optimizer = two_saved(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    if rank == 0:
        elsewhere.mkdir()
        manager.path(1).rename(elsewhere / "whole")
        manager.path(1).symlink_to(elsewhere / "whole")
        for name in ("removed-step-00000000", "step-00000007"):
            (elsewhere / name).mkdir()
            (elsewhere / name / f"{data_prefix(0, '0123456789ab')}0.distcp").touch()
            (tmp_path / "run" / name).symlink_to(elsewhere / name)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert manager.save(3, model, optimizer)
        assert manager.resume(model, optimizer) == (3, {})
    dist.barrier()
    assert names_in(tmp_path / "run") == ["step-00000002", "step-00000003"]
    load(elsewhere / "whole", model, optimizer)
    assert all(names_in(elsewhere / name) for name in ("removed-step-00000000", "step-00000007"))


@on_ranks(2)
def test_ranks_with_different_folders(tmp_path: Path, rank: int) -> None:
    _, model, optimizer = two_saved(tmp_path / "1")
    manager = CheckpointManager(tmp_path / str(rank))
    with pytest.raises(ValueError, match=r"ranks were given different paths: rank 0 .*/0, rank 1 .*/1;"):
        manager.resume(model, optimizer)
    with pytest.raises(ValueError, match="ranks were given different paths"):
        manager.save(1, model, optimizer)
    assert names_in(tmp_path) == ["1"] and names_in(tmp_path / "1") == ["step-00000001", "step-00000002"]


def test_a_run_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointManager(tmp_path, keep=0)


def test_removal_that_was_stopped_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = trained(1)
    manager.save(1, model, optimizer)
    monkeypatch.setattr("flatfsdp.checkpoint.media.shutil.rmtree", _stop)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, model, optimizer)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["removed-step-00000001", "step-00000002"]
    assert manager.resume(model, optimizer) == (2, {})
    assert names_in(tmp_path) == ["step-00000002"]


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
    assert names_in(tmp_path) == kept
    assert names_in(tmp_path / "step-00000009") == ["model.pth"]


@on_ranks(2)
def test_tidying_that_fails_stops_nobody(tmp_path: Path, rank: int) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    model, optimizer = trained(1)
    manager.save(1, model, optimizer)
    refusal = PermissionError("it belongs to somebody else")
    with mock.patch("flatfsdp.checkpoint.media.Disk.remove", side_effect=refusal):
        assert manager.save(2, model, optimizer)
    assert manager.resume(model, optimizer) == (2, {})


@on_ranks(2)
def test_a_rank_without_numbers_takes_part(tmp_path: Path, rank: int) -> None:
    model = shard(torch.nn.Linear(1, 1, bias=False))
    assert len(largest_magnitudes(model)) == (rank == 0)
    assert CheckpointManager(tmp_path).save(1, model)
