"""Models built on the meta device get memory, values and shards unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import by_class, shard
from flatfsdp.checkpoint import full_state_dict
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
