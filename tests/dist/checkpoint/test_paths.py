"""Paths that are no local folder, or not the same on all ranks, are named as such, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flatfsdp import checkpoint
from flatfsdp.checkpoint import CheckpointError, CheckpointManager, Reader, Writer
from tests.support.checkpoints import names_in
from tests.support.faults.training import Run
from tests.support.ranks import on_ranks


def in_own_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another current folder on each rank, as if each were on a host with a disk of its own."""
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("tos://bucket/run", ModuleNotFoundError, "pip install tosfs"),
        ("s4://bucket/run", ValueError, "is no URL that fsspec knows"),
        ("memory://bucket/run*", ValueError, "has a wildcard"),
    ],
)
@on_ranks(2)
def test_urls_never_become_folders(
    tmp_path: Path, rank: int, url: str, error: type[Exception], text: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        in_own_folder(patch, tmp_path / str(rank))
        run = Run()
        state = {"model": checkpoint.sharded_state_dict(run.model)}
        for given in (url, Path(url)):
            for way in (
                lambda path: checkpoint.save(path, run.model, run.optimizer, overwrite=True),
                lambda path: checkpoint.load(path, run.model, run.optimizer),
                CheckpointManager,
                Writer,
                Reader,
            ):
                with pytest.raises(error, match=text):
                    way(given)
        # One rank is enough; the other one hears of it.
        with pytest.raises(error, match=text):
            checkpoint.save(url if rank else "run", run.model)
        with pytest.raises(error, match=text):
            checkpoint.load(url if rank else "run", run.model)
        for save_or_load in (
            lambda: dcp.save(state, checkpoint_id=url, storage_writer=Writer("run")),
            lambda: dcp.load(state, checkpoint_id=url, storage_reader=Reader("run")),
        ):
            with pytest.raises(error, match=text):
                save_or_load()
        assert list(Path().iterdir()) == []
        assert CheckpointManager(f"file://{tmp_path}").folder == tmp_path


@on_ranks(2)
def test_ranks_with_different_paths_are_told_so(tmp_path: Path, rank: int) -> None:
    run = Run()
    run.train()
    checkpoint.save(tmp_path / "one", run.model, run.optimizer, extra={"step": 1})
    checkpoint.save(tmp_path / "other", run.model, run.optimizer, extra={"step": 1})
    dist.barrier()
    before = run.digest()
    # Which of them exists, and whether both do, makes no difference.
    for names in (("one", "missing"), ("missing", "one"), ("one", "other")):
        told = rf"ranks were given different paths: rank 0 .*/{names[0]}, rank 1 .*/{names[1]}; pass one"
        with pytest.raises(ValueError, match=told):
            checkpoint.load(tmp_path / names[rank], run.model, run.optimizer)
        with pytest.raises(ValueError, match=told):
            checkpoint.save(tmp_path / names[rank], run.model, run.optimizer, overwrite=True)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        checkpoint.load(tmp_path / "missing", run.model, run.optimizer)
    assert run.digest() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]
    # Two spellings of one path are one.
    checkpoint.load(f"{tmp_path}/./one/" if rank else tmp_path / "one", run.model, run.optimizer)


@on_ranks(2)
def test_a_rank_that_does_not_see_the_folder(tmp_path: Path, rank: int) -> None:
    """Its files are not damaged, and the manager does not put them aside."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run()
        manager = CheckpointManager(tmp_path / "0" / "run")
        dist.barrier()
        in_own_folder(patch, tmp_path / str(rank))
        dist.barrier()
        manager.save(1, run.model, run.optimizer)
        dist.barrier()
        with pytest.raises(
            CheckpointError, match=r"rank 0 sees run/step-00000001, and rank 1 does not; load"
        ):
            checkpoint.load("run/step-00000001", run.model)
        with pytest.raises(CheckpointError, match="rank 0 sees run/step-00000001, and rank 1 does not"):
            CheckpointManager("run").resume(run.model, run.optimizer)
        with pytest.raises(CheckpointError, match="which rank 0 does not see; save to storage that all"):
            checkpoint.save("another", run.model)
        dist.barrier()
        assert names_in(manager.folder) == ["step-00000001"]
