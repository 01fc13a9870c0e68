"""Damaged, missing and foreign files are named on every rank, before the model is changed."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flatfsdp import checkpoint
from flatfsdp.checkpoint import CheckpointError, DamagedCheckpoint
from flatfsdp.checkpoint.store import place
from tests.support.faults.damage import KINDS, random_damage
from tests.support.faults.full import random_full_disks
from tests.support.faults.training import Run
from tests.support.ranks import on_ranks


def test_every_kind_of_damage_to_every_file() -> None:
    """A sample of what `python -m tests.support.faults damage` tries."""
    trials = list(random_damage(5 * len(KINDS), seed=1))
    tried, wrong = trials[-1]
    assert wrong == [] and tried.keys() == set(KINDS) and tried.total() == 5 * len(KINDS)


def saved(folder: Path) -> Run:
    run = Run()
    run.train()
    checkpoint.save(folder, run.model, run.optimizer, extra={"step": 1})
    dist.barrier()
    return run


@on_ranks(2)
def test_folders_without_a_checkpoint(rank: int, tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        run.load(tmp_path / "nowhere")
    (tmp_path / f"empty-{rank}").mkdir()
    dist.barrier()
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata is missing, so this is no checkpoint"):
        run.load(tmp_path / "empty-0")
    saved(tmp_path / "checkpoint")
    if rank == 1:
        (tmp_path / "checkpoint" / ".metadata").unlink()
    dist.barrier()
    with pytest.raises(DamagedCheckpoint, match="a save to this folder did not end"):
        run.load(tmp_path / "checkpoint")


@on_ranks(2)
def test_without_verification_lengths_count_all_the_same(rank: int, tmp_path: Path) -> None:
    run = saved(tmp_path)
    run.train()
    before = run.digest()
    name = next(tmp_path.glob("__1_*")).name
    if rank == 0:
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-1])
    dist.barrier()
    with pytest.raises(DamagedCheckpoint, match=f"{name}, written by rank 1, has [0-9]+ bytes, and"):
        checkpoint.load(tmp_path, run.model, run.optimizer, verify=False)
    assert run.digest() == before


@pytest.mark.parametrize("protocol", ["", "objects://"], ids=["disk", "store"])
@on_ranks(2)
def test_without_digests_a_flipped_bit_is_not_noticed(rank: int, protocol: str, tmp_path: Path) -> None:
    """A file that is cut off is."""
    folder = place(f"{protocol}{tmp_path}/run")
    run, other = Run(), Run(seed=1)
    run.train()
    checkpoint.save(folder, run.model, run.optimizer, extra={"step": 1}, digests=False)
    other.load(folder)
    assert other.digest() == run.digest()
    dist.barrier()
    (file,) = (path for path in folder.iterdir() if path.name.startswith("__1_"))
    data = bytearray(file.read_bytes())
    # Of a number, not of the archive around it.
    data[data.index(run.model.state_dict()["1.bias"][-2:].numpy().tobytes())] ^= 1
    if rank == 0:
        file.write_bytes(bytes(data))
    dist.barrier()
    other.load(folder)
    assert other.digest() != run.digest()
    dist.barrier()
    if rank == 0:
        file.write_bytes(bytes(data[:-1]))
    dist.barrier()
    with pytest.raises(DamagedCheckpoint, match=f"{file.name}, written by rank 1, has {len(data) - 1} bytes"):
        other.load(folder)


@on_ranks(2)
def test_what_plain_dcp_has_written_is_read_as_far_as_it_is_there(rank: int, tmp_path: Path) -> None:
    """A foreign checkpoint has no digests, but lengths; also if it replaced a checkpoint of ours."""
    run = saved(tmp_path)
    run.train()
    before = run.digest()
    state = checkpoint.sharded_training_state(run.model, run.optimizer)
    dcp.save(state, checkpoint_id=tmp_path)
    other = Run(seed=1)
    assert checkpoint.load(tmp_path, other.model, other.optimizer) == {}
    other.step = run.step
    assert other.digest() == before
    if rank == 0:
        data = (tmp_path / "__0_0.distcp").read_bytes()
        (tmp_path / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    dist.barrier()
    other.train()
    before = other.digest()
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp has [0-9]+ bytes, and at least"):
        checkpoint.load(tmp_path, other.model, other.optimizer)
    assert other.digest() == before


def fails(on: bool, place: str, error: Exception) -> AbstractContextManager[object]:
    """Context in which a function of `flatfsdp.checkpoint` raises on some ranks."""
    return mock.patch(f"flatfsdp.checkpoint.{place}", side_effect=error) if on else nullcontext()


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, DamagedCheckpoint), (errno.ESTALE, CheckpointError)]
)
@on_ranks(2)
def test_what_a_medium_has_lost_is_damage_and_what_may_pass_is_not(
    rank: int, number: int, error: type[CheckpointError], tmp_path: Path
) -> None:
    run = saved(tmp_path)
    before = run.digest()
    refusal = OSError(number, os.strerror(number))
    with (
        fails(rank == 1, "digests.os.preadv", refusal),
        pytest.raises(error, match=rf"__1_.*cannot be read: {os.strerror(number)}") as caught,
    ):
        run.load(tmp_path)
    assert type(caught.value) is error
    assert run.digest() == before


PLACES = ["loading.torch.zeros_like", "optimizer_state._check_fit", "loading.adopt_late_buffers"]


@pytest.mark.parametrize("place", [*PLACES, "opening.torch.load"])
@on_ranks(2)
def test_what_fails_on_one_rank_is_raised_on_all(rank: int, place: str, tmp_path: Path) -> None:
    """An error on one rank, such as a lack of memory, does not leave the others waiting."""
    run = saved(tmp_path)
    with (
        fails(rank == 1, place, MemoryError("no room")),
        pytest.raises(CheckpointError, match="rank 1: MemoryError: no room"),
    ):
        run.load(tmp_path)


def test_a_disk_that_is_full_costs_no_checkpoint() -> None:
    *_, wrong = random_full_disks(3, seed=1)
    assert not wrong, wrong
