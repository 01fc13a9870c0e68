"""Ranks that begin with other values raise in the first forward, unless these are replaced, or not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import FlatFSDP, by_class, checkpoint, shard
from flatfsdp.comm.mesh import make_mesh
from flatfsdp.engine.storage.first_values import digest
from tests.support.meshes import replicating
from tests.support.ranks import on_ranks

DIFFERS = r"parameter 2\.weight began with other values on other ranks.*sync_module_states=True"


def model(seed: int) -> nn.Sequential:
    """A model of which two layers depend on the seed."""
    torch.manual_seed(7)
    first = nn.Linear(6, 6)
    torch.manual_seed(seed)
    return nn.Sequential(first, nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3))


def use(module: nn.Module) -> torch.Tensor:
    return module(torch.ones(2, 6))


@on_ranks(2, 3)
def test_the_first_parameter_that_differs_is_named_on_all_ranks(rank: int) -> None:
    module = shard(model(int(rank == 1)), by_class(nn.Linear))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DIFFERS):
            use(module)
        with torch.no_grad(), pytest.raises(RuntimeError, match=DIFFERS):
            use(module)


@on_ranks(4)
def test_of_replicas_the_first_one_counts_and_ranks_of_it_are_compared(rank: int) -> None:
    mesh = make_mesh(dp_replicate=2, dp_shard=2).dp
    by_replica, by_shard = (shard(model(seed), by_class(nn.Linear), mesh=mesh) for seed in divmod(rank, 2))
    torch.testing.assert_close(use(by_replica), use(model(0)))
    # The other replica's values do not matter.
    seed = rank if rank > 1 else 0
    torch.testing.assert_close(use(shard(model(seed), by_class(nn.Linear), mesh=mesh)), use(model(0)))
    with pytest.raises(RuntimeError, match=DIFFERS):
        use(by_shard)


@on_ranks(2)
def test_replicas_without_shards_take_the_first_ones_values(rank: int) -> None:
    torch.testing.assert_close(
        use(shard(model(rank), by_class(nn.Linear), mesh=replicating())), use(model(0))
    )


def load_state_dict(module: nn.Module, folder: Path) -> None:
    module.load_state_dict(model(5).state_dict())


def load_checkpoint(module: nn.Module, folder: Path) -> None:
    checkpoint.save(folder, shard(model(5), by_class(nn.Linear)))
    checkpoint.load(folder, module)


def write_parts(module: nn.Module, folder: Path) -> None:
    with torch.no_grad():
        for own, wanted in zip(module.parameters(), shard(model(5)).parameters(), strict=True):
            own.copy_(wanted) if own.shape == wanted.shape else own.zero_()


def write_whole(module: Any, folder: Path) -> None:
    with module.summon_full_params():
        module.load_state_dict(model(5).state_dict())


@pytest.mark.parametrize("replace", [load_state_dict, load_checkpoint, write_parts, write_whole])
@on_ranks(2)
def test_values_that_were_replaced_do_not_count(rank: int, replace: Any, tmp_path: Path) -> None:
    module = shard(model(rank), by_class(nn.Linear))
    replace(module, tmp_path / "saved")
    assert use(module).isfinite().all()
    if replace is not write_parts:
        torch.testing.assert_close(use(module), use(model(5)))


@pytest.mark.parametrize("unit", [nn.Linear, nn.LayerNorm], ids=["in another unit", "in the same unit"])
@on_ranks(2, 3)
def test_what_was_not_loaded_counts(rank: int, unit: type[nn.Module]) -> None:
    module = shard(model(rank), by_class(unit))
    state = {name: value for name, value in model(5).state_dict().items() if not name.startswith("2.")}
    module.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=DIFFERS):
        use(module)


@on_ranks(4)
def test_a_load_counts_for_ranks_that_have_only_padding(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = nn.Linear(2, 2)
    dcp.save(checkpoint.sharded_state_dict(shard(values)), checkpoint_id=tmp_path)
    torch.manual_seed(rank)
    module = shard(nn.Linear(2, 2))
    dcp.load(checkpoint.sharded_state_dict(module), checkpoint_id=tmp_path)
    assert module(torch.ones(2)).isfinite().all()


def test_a_digest_takes_little_memory() -> None:
    values = torch.ones(2**24, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = digest(values)
    assert found == digest(values.clone()) != digest(values.index_fill(0, torch.tensor(7), 2.0))
    assert max(event.cpu_memory_usage for event in profiled.events()) <= values.nbytes


@on_ranks(2, 4)
def test_sync_module_states_takes_the_first_ranks_values(rank: int) -> None:
    module = model(rank)
    module.register_buffer("shift", torch.full((2,), float(rank)))
    module = shard(module, by_class(nn.Linear), sync_module_states=True)
    torch.testing.assert_close(use(module), use(model(0)))
    assert next(module.buffers()).eq(0.0).all()


@on_ranks(2)
def test_sync_module_states_compares_shapes_first(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"the model is not the same on all ranks.*weight \(4, [23]\)"):
        shard(nn.Linear(2 + rank, 4), sync_module_states=True)


@on_ranks(2)
def test_modules_from_the_meta_device_are_synchronised_as_they_are_made(rank: int) -> None:
    torch.manual_seed(rank)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    module = shard(module, by_class(nn.Linear), device="cpu", sync_module_states=True)
    torch.manual_seed(0)
    torch.testing.assert_close(use(module), use(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))))


def test_a_process_of_torchrun_without_a_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for build in (shard, FlatFSDP):
        with pytest.raises(RuntimeError, match=r"torchrun started 2 processes.*init_process_group"):
            build(nn.Linear(2, 2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    shard(nn.Linear(2, 2))
