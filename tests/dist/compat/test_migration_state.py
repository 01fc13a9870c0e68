"""State that programs written for fairscale save and load with FlatFSDP: models, optimizers, flat shards."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp.checkpoint
import flatfsdp.compat.fairscale
from tests.support.against_plain import assert_equal
from tests.support.fairscale_programs import (
    CPU,
    PLAIN,
    Build,
    adam,
    by_hand,
    joined,
    local_files,
    made,
    names_of,
    optimizer_is_loaded,
    optimizer_is_saved,
    saved_and_loaded,
    summoned,
    tied_and_frozen,
    train,
)
from tests.support.ranks import on_ranks, run_ranks

# ---- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [saved_and_loaded, summoned])
def test_state_dicts_are_saved_and_loaded_and_full_parameters_are_summoned(program: Any) -> None:
    for result in run_ranks(2, program, "flatfsdp", "cpu"):
        assert all(result.values()), result


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_is_reported_by_name() -> None:
    model = made(by_hand)
    state = model.state_dict()
    del state["blocks.1.up.weight"]
    state["extra"] = torch.zeros(1)
    reported = model.load_state_dict(state, strict=False)
    assert (reported.missing_keys, reported.unexpected_keys) == (["blocks.1.up.weight"], ["extra"])
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    message = str(error.value)
    assert 'Missing key(s) in state_dict: "blocks.1.up.weight"' in message
    assert 'Unexpected key(s) in state_dict: "extra"' in message


@pytest.mark.parametrize("build", [by_hand, tied_and_frozen])
def test_local_shards_are_joined_without_ranks(build: Build) -> None:
    files = run_ranks(4, local_files, "flatfsdp", "cpu", build)
    assert_equal(joined(files), files[0][2])
    with pytest.raises(ValueError, match="one pair a rank"):
        flatfsdp.compat.fairscale.FSDP.consolidate_shard_weights([files[0][0]], [])
    with pytest.raises(ValueError, match="is missing"):
        joined(files[:1])


def expert_files(rank: int, world_size: int, ranks_of_expert: int) -> tuple[dict[str, Any], Any, Any]:
    """Local files of a model in which `ranks_of_expert` ranks each share an expert, and its state dict."""
    api = names_of("flatfsdp")
    groups = [
        dist.new_group(list(range(first, first + ranks_of_expert)))
        for first in range(0, world_size, ranks_of_expert)
    ]
    number = rank // ranks_of_expert
    torch.manual_seed(1 + number)
    expert = nn.BatchNorm1d(4)
    nn.init.normal_(expert.weight)
    torch.manual_seed(0)
    wrapped = api.FullyShardedDataParallel(expert, process_group=groups[number])
    model = api.FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), wrapped))
    return model.local_state_dict(), model.local_metadata_dict(), model.state_dict()


def test_of_experts_the_first_ranks_is_joined() -> None:
    files = run_ranks(2, expert_files, 1)
    assert not torch.equal(files[0][2]["1.weight"], files[1][2]["1.weight"])
    from_json = [(local, json.loads(json.dumps(about)), full) for local, about, full in files]
    assert_equal(joined(from_json), files[0][2])
    # The engine itself has no rule for which of them is meant.
    with pytest.raises(ValueError, match=r"1\.flat_param: ranks hold different values"):
        flatfsdp.checkpoint.consolidate(*zip(*(each[:2] for each in files), strict=True))


def test_experts_over_several_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.flat_param: ranks hold different values.*experts"):
        joined(run_ranks(4, expert_files, 2))


# ---- optimizers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [by_hand, tied_and_frozen])
def test_optimizer_state_moves_to_other_numbers_of_ranks(build: Build) -> None:
    results = run_ranks(4, optimizer_is_saved, "flatfsdp", "cpu", build)
    assert [full for _, full, _ in results[1:]] == [None] * 3
    state, full, final = results[0]
    assert full is not None
    numbers = list(full["param_id_map"])
    assert numbers == full["param_groups"][0]["params"] == list(range(len(numbers)))
    assert full["uncollected_local_ids"] == []
    plain = made(build, PLAIN)
    trained = [p for p in plain.parameters() if p.requires_grad]
    shapes = sorted(tuple(entry["exp_avg"].shape) for entry in full["state"].values())
    assert shapes == sorted(tuple(p.shape) for p in trained)
    frozen = [number for number, local in full["param_id_map"].items() if local is None]
    assert len(frozen) == len(list(plain.parameters())) - len(trained)
    assert all(entry["step"] == 2 for entry in full["state"].values())
    for world_size in (1, 2, 4):
        for found in run_ranks(world_size, optimizer_is_loaded, "flatfsdp", "cpu", build, state, full):
            torch.testing.assert_close(found, final, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """A scalar parameter before others of its flat parameter, and a unit that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.unused = flatfsdp.compat.fairscale.FSDP(nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * self.scale).square().mean()


@on_ranks(2)
def test_moments_of_a_scalar_parameter_have_no_dimensions_and_unused_units_no_state() -> None:
    def begin() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = flatfsdp.compat.fairscale.FSDP(Scaled())
        return model, adam(model.parameters())

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 5)).backward()
        for parameter in model.module.unused.parameters():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begin()
    step(model, optimizer)
    of_first: list[Any] = [model.gather_full_optim_state_dict(optimizer, recipient_rank=0)]
    dist.broadcast_object_list(of_first)
    [full] = of_first
    assert [full["state"][0][key].shape for key in ("exp_avg", "exp_avg_sq")] == [(), ()]
    assert full["state"].keys() == {0, 1} and [*full["param_id_map"].values()] == [0, 0, None, None]
    other, loaded = begin()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(other.get_shard_from_optim_state_dict(full))
    for each in ((model, optimizer), (other, loaded)):
        step(*each)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@on_ranks(2)
def test_optimizer_state_that_does_not_fit_is_refused(rank: int) -> None:
    model = made(by_hand)
    optimizer = adam(model.parameters())
    train(model, optimizer, rank, CPU, steps=1)
    full = model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        with pytest.raises(ValueError, match="has 4 parameters and this model"):
            model.get_shard_from_optim_state_dict({**full, "param_id_map": dict.fromkeys(range(4), 0)})
        moved = dict.fromkeys(full["param_id_map"], 3)
        with pytest.raises(ValueError, match="wrap the same modules"):
            model.get_shard_from_optim_state_dict({**full, "param_id_map": moved})
        wrong = {**full["state"], 0: {"exp_avg": torch.zeros(3, 3)}}
        with pytest.raises(ValueError, match="has shape"):
            model.get_shard_from_optim_state_dict({**full, "state": wrong})
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(AssertionError, match="full_optimizer_state_dict"):
        model.gather_full_optim_state_dict(torch.optim.SGD(groups, lr=0.1))
