"""A save is complete or absent, even if storage fails; its contents, and their readers."""

from __future__ import annotations

import os
import pickle
import pickletools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from flatfsdp import checkpoint, shard
from flatfsdp.checkpoint import CheckpointError, Writer
from flatfsdp.checkpoint.opening import open_checkpoint
from flatfsdp.comm.ranks import ALONE
from tests.support.faults.training import Run
from tests.support.ranks import on_ranks


def files_of(folder: Path) -> set[str]:
    dist.barrier()
    found = set(os.listdir(folder))
    dist.barrier()
    return found


@on_ranks(2)
def test_a_checkpoint_is_only_replaced_if_asked(tmp_path: Path) -> None:
    run = Run()
    checkpoint.save(tmp_path, run.model, run.optimizer, extra={"step": 0})
    (tmp_path / "notes.txt").write_text("mine")
    before = files_of(tmp_path)
    run.train()
    with pytest.raises(FileExistsError, match=r"holds a checkpoint; .* overwrite=True"):
        checkpoint.save(tmp_path, run.model, run.optimizer)
    assert files_of(tmp_path) == before
    checkpoint.save(tmp_path, run.model, run.optimizer, extra={"step": 1}, overwrite=True)
    after = files_of(tmp_path)
    assert before & after == {".metadata", "notes.txt"} and len(after) == len(before)
    other = Run(seed=1)
    other.load(tmp_path)
    assert other.digest() == run.digest()


@on_ranks(1, 2)
def test_extra_comes_back_on_every_rank(rank: int, tmp_path: Path) -> None:
    run = Run()
    extra = {"step": 7, "loss": [1.5, float("inf")], "generator": torch.get_rng_state(), "name": "x"}
    checkpoint.save(tmp_path / "a", run.model, extra=extra if rank == 0 else {"step": 8})
    found = checkpoint.load(tmp_path / "a", run.model)
    assert torch.equal(found.pop("generator"), extra.pop("generator")) and found == extra
    checkpoint.save(tmp_path / "b", run.model)
    assert checkpoint.load(tmp_path / "b", run.model) == {}
    assert not any(name.startswith("extra") for name in files_of(tmp_path / "b"))


@on_ranks(2)
def test_what_could_not_be_loaded_is_not_saved(rank: int, tmp_path: Path) -> None:
    """One rank is enough."""
    run = Run()
    with pytest.raises(TypeError, match=r"extra\['path'\] \(PosixPath\) is more than tensors, numbers"):
        checkpoint.save(tmp_path / "a", run.model, extra={"path": tmp_path if rank == 1 else 0})
    with pytest.raises(TypeError, match=r"extra\['call'\] cannot be saved"):
        checkpoint.save(tmp_path / "a", run.model, extra={"call": lambda: 0})
    run.optimizer.param_groups[0]["schedule"] = run
    with pytest.raises(TypeError, match="the optimizer's schedule"):
        checkpoint.save(tmp_path / "a", run.model, run.optimizer)
    assert not (tmp_path / "a").exists()


@on_ranks(2)
def test_ranks_agree_on_digests_before_anything_is_written(rank: int, tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(CheckpointError, match="different values of digests: rank 1 True, rank 0 False"):
        checkpoint.save(tmp_path / "a", run.model, digests=rank == 1)
    assert not (tmp_path / "a").exists()


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Context in which the system refuses longer files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full", [0, 1])
@on_ranks(2)
def test_storage_that_refuses_on_one_rank(rank: int, full: int, tmp_path: Path) -> None:
    """The old checkpoint stays, the message is short and names the rank and the system's reason."""
    run = Run()
    run.train()
    checkpoint.save(tmp_path, run.model, run.optimizer, extra={"step": 1})
    before, digest = files_of(tmp_path), run.digest()
    run.train()
    for size in (0, 1000, 5000):
        with small_files(size if rank == full else resource.RLIM_INFINITY):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.save(tmp_path, run.model, run.optimizer, extra={"step": 2}, overwrite=True)
        message = str(caught.value)
        assert message == f"the checkpoint {tmp_path} was not saved: rank {full}: File too large: {tmp_path}"
        # Also what the other rank has written, which would keep a full disk full.
        assert files_of(tmp_path) == before
        other = Run(seed=1)
        other.load(tmp_path)
        assert other.digest() == digest
    checkpoint.save(tmp_path, run.model, run.optimizer, extra={"step": 2}, overwrite=True)
    assert len(files_of(tmp_path)) == len(before)


@on_ranks(2)
def test_a_refused_save_leaves_the_one_before_alone(tmp_path: Path) -> None:
    """Saves with the same Writer, which has written the old checkpoint, too."""
    run, writer = Run(), Writer(tmp_path)
    dcp.save(checkpoint.sharded_training_state(run.model), storage_writer=writer)
    before = files_of(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="holds a checkpoint"):
        dcp.save(checkpoint.sharded_training_state(run.model), storage_writer=writer)
    writer.discard()
    assert files_of(tmp_path) == before


@on_ranks(2)
def test_a_path_that_is_a_file(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        (tmp_path / "file").write_text("")
    dist.barrier()
    run = Run()
    with pytest.raises(CheckpointError, match="was not saved: rank 0: File exists: "):
        checkpoint.save(tmp_path / "file", run.model)
    with pytest.raises(FileNotFoundError, match="it is a file"):
        checkpoint.load(tmp_path / "file", run.model)


@on_ranks(3)
def test_ranks_with_nothing_write_no_file(rank: int, tmp_path: Path) -> None:
    """Two parameters, each at the beginning of a shard."""
    torch.manual_seed(0)
    model = shard(nn.Linear(1, 1))
    checkpoint.save(tmp_path, model)
    files = files_of(tmp_path)
    assert {name[:4] for name in files if name.startswith("__")} == {"__0_", "__1_"}
    assert all((tmp_path / name).stat().st_size for name in files)
    other = shard(nn.Linear(1, 1))
    checkpoint.load(tmp_path, other)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@on_ranks(2)
def test_metadata_is_torchs_own_and_names_the_save(tmp_path: Path) -> None:
    run = Run()
    writer = Writer(tmp_path, overwrite=True)
    ids = []
    for _ in range(2):
        dcp.save({"model": checkpoint.sharded_state_dict(run.model)}, storage_writer=writer)
        dist.barrier()
        opened = open_checkpoint(tmp_path, ALONE, torch.device("cpu"))
        assert opened.manifest is not None and opened.metadata.storage_meta is not None
        assert opened.metadata.storage_meta.save_id == opened.manifest.save_id
        ids.append(opened.manifest.save_id)
        strings = [
            argument
            for _, argument, _ in pickletools.genops((tmp_path / ".metadata").read_bytes())
            if isinstance(argument, str)
        ]
        assert not any("flatfsdp." in each for each in strings)
        dist.barrier()
    assert ids[0] != ids[1]
    assert pickle.loads(pickle.dumps(writer)).path == tmp_path
    with pytest.raises(dcp.CheckpointException, match="holds a checkpoint"):
        dcp.save({"model": checkpoint.sharded_state_dict(run.model)}, storage_writer=Writer(tmp_path))


@on_ranks(1)
def test_a_save_that_is_not_collective_is_refused(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(ValueError, match="Writer needs use_collectives=True"):
        dcp.save({"a": run.step}, storage_writer=Writer(tmp_path), use_collectives=False)
