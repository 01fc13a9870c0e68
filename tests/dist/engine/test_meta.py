"""Models built on the meta device get memory, values and shards unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import FlatFSDP, by_class, checkpoint, shard
from flatfsdp.checkpoint import full_state_dict
from flatfsdp.comm.mesh import make_mesh
from flatfsdp.engine.storage.first_values import digest
from tests.support.meshes import replicating
from tests.support.models import VOCAB, WIDTH, Block, Net, data, same_trace, train
from tests.support.ranks import on_ranks


def init(module: nn.Module) -> None:
    """Makes values that depend only on the shape, so the order of initialisation does not matter."""
    for parameter in module.parameters(recurse=False):
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)


def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


@pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
@on_ranks(1, 2)
def test_trains_like_a_model_built_in_memory(rank: int, flag: bool) -> None:
    ordinary = Net()
    with torch.no_grad():
        ordinary.apply(init)
    options: dict[str, Any] = {"optimize_backward_concat": flag}
    expected = shard(ordinary, by_class(Block), **options)
    model = shard(on_meta(Net), by_class(Block), device="cpu", param_init_fn=init, **options)
    same = same_trace(train(model, rank), train(expected, rank))
    assert all(same.values()), same


class Special(nn.Module):
    """Tied weights, an attention whose parts are reset by their owner, a recurrent layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embedding.weight
        self.head.weight.mark = "kept"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.attention(x, x, x)[0]
        x, _ = self.rnn(x)
        return self.head(self.norm(x.mean(0))).sum()


@on_ranks(2)
def test_reset_parameters_children_first_tied_stay_tied(rank: int) -> None:
    torch.manual_seed(0)
    model = shard(on_meta(Special), device="cpu")
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    state = full_state_dict(model)
    assert state["head.weight"] is not None and torch.equal(state["head.weight"], state["embedding.weight"])
    assert not any(value.isnan().any() for value in state.values())
    # What the owner sets after its parts have been reset.
    assert torch.equal(state["attention.out_proj.bias"], torch.zeros(WIDTH))
    assert model.head.weight is model.embedding.weight and model.head.weight.mark == "kept"


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_what_cannot_be_initialised_is_named() -> None:
    with pytest.raises(ValueError, match=r"parameter weight is on the meta device; pass device="):
        shard(on_meta(lambda: nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"1 \(NoReset\) .* pass param_init_fn="):
        shard(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), NoReset())), device="cpu")
    with pytest.raises(ValueError, match=r"0\.weight .* still uninitialised after param_init_fn"):
        shard(on_meta(lambda: nn.Sequential(nn.Linear(2, 2))), device="cpu", param_init_fn=lambda m: None)


def test_what_is_in_memory_already_keeps_its_values() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), on_meta(lambda: nn.Linear(3, 3)))
    weight = net[0].weight.detach().clone()
    model = shard(net, device="cpu")
    assert torch.equal(model.state_dict()["0.weight"], weight)


class Masked(nn.Module):
    """A module with buffers only, whose `reset_parameters` forgets the integers."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.forgets = forgets

    def reset_parameters(self) -> None:
        self.table.fill_(2.0)
        if not self.forgets:
            self.mask.fill_(True)


def test_buffers_are_made_and_checked_too() -> None:
    inner = shard(nn.Linear(3, 3))
    model = shard(nn.Sequential(inner, on_meta(lambda: Masked(forgets=False))), device="cpu")
    assert bool(model[1].mask.all()) and torch.equal(model[1].table, torch.full((3,), 2.0))
    with pytest.raises(ValueError, match=r"0\.mask .* still uninitialised"):
        shard(on_meta(lambda: nn.Sequential(Masked(forgets=True))), device="cpu")


def test_after_an_error_the_module_is_on_the_meta_device_again() -> None:
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), NoReset()))
    for bad in (None, lambda owner: None):
        with pytest.raises(ValueError, match="param_init_fn"):
            shard(module, device="cpu", param_init_fn=bad)
    assert all(p.is_meta for p in module.parameters())
    model = shard(module, device="cpu", param_init_fn=init)
    assert not any(value.isnan().any() for value in model.state_dict().values())


def test_a_weight_tied_across_units_is_noticed_on_meta() -> None:
    net = on_meta(lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)))
    net[1].weight = net[0].weight
    net[0] = shard(net[0], device="cpu")
    with pytest.raises(ValueError, match=r"1\.weight is tied to weight"):
        shard(net, device="cpu")


@on_ranks(2)
def test_fsdp2s_recipe_names_the_lines_to_delete(rank: int) -> None:
    """`to_empty`, then `reset_parameters`; without both it is initialised, and trains."""
    model = shard(on_meta(Net), by_class(Block), device="cpu")
    with pytest.raises(TypeError, match=r"has memory and values.*Delete to_empty\(\), and after it"):
        model.to_empty(device="cpu")
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    assert not any(value.isnan().any() for value in model.state_dict().values())


# ---- values that ranks begin with ------------------------------------------------------------------------


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
