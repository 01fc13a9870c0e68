"""Each data-parallel rank's own state, such as a data loader's position, survives `save` and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import checkpoint, shard
from flatfsdp.checkpoint import CheckpointManager, of_each_rank, of_this_rank
from flatfsdp.parallel import make_mesh
from tests.support.assertions import assert_raises
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_each_rank_has_its_own_back(rank: int, tmp_path: Path) -> None:
    model: Any = shard(nn.Linear(4, 4))
    manager = CheckpointManager(tmp_path)
    state = {"read": 10 + rank, "left": torch.arange(rank + 1), "documents": ["a", "b"][rank:]}
    manager.save(1, model, extra={"loader": of_each_rank(state, model), "step": rank})
    found = manager.resume(model)
    assert found is not None and found.extra["step"] == 0
    own = of_this_rank(found.extra["loader"], model)
    assert (own["read"], own["documents"]) == (10 + rank, ["a", "b"][rank:])
    assert torch.equal(own["left"], torch.arange(rank + 1))
    assert_raises(TypeError, "pass what of_each_rank returned", of_this_rank, found.extra, model)
    refused = {"loader": of_each_rank({"file": tmp_path}, model)}
    assert_raises(TypeError, "more than tensors", checkpoint.save, tmp_path / "a", model, extra=refused)


@on_ranks(2)
def test_ranks_with_the_same_data_are_one(rank: int) -> None:
    mesh = make_mesh(tp=2)
    model: Any = shard(nn.Linear(4, 4), mesh=mesh.dp, tp_group=mesh.tp_group)
    saved = of_each_rank(f"of rank {rank}", model)
    assert of_this_rank(saved, model) == "of rank 0"
    # What two data-parallel ranks have saved is no position for this one.
    over_two = of_each_rank(rank, shard(nn.Linear(4, 4)))
    message = "2 data-parallel ranks saved a state each, and now there are 1"
    assert_raises(ValueError, message, of_this_rank, over_two, model)


@on_ranks(2)
def test_torchdatas_loader(rank: int, world_size: int, tmp_path: Path) -> None:
    """In the middle of an epoch, of which each rank reads its part."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    from torch.utils.data import DistributedSampler

    def make() -> Any:
        sampler: Any = DistributedSampler(range(32), world_size, rank, seed=3)
        return loaders.StatefulDataLoader(range(32), batch_size=2, sampler=sampler)

    model: Any = shard(nn.Linear(4, 4))
    loader, manager = make(), CheckpointManager(tmp_path)
    batches = iter(loader)
    read = [next(batches) for _ in range(3)]
    manager.save(3, model, extra={"loader": of_each_rank(loader.state_dict(), model)})
    rest = torch.cat([*batches])
    found = manager.resume(model)
    assert found is not None
    again = make()
    again.load_state_dict(of_this_rank(found.extra["loader"], model))
    assert torch.equal(torch.cat([*again]), rest)
    assert len({*torch.cat([*read, rest]).tolist()}) == 16
