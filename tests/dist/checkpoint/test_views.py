"""Optimizers over views save and load as those over flat parameters, and each loads the other's state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from flatfsdp import FlatFSDP, checkpoint, optim, param_groups
from flatfsdp.checkpoint.sharded import sharded_optimizer_state_dict
from flatfsdp.engine.whole.units import named_groups
from tests.support.in_place import cut_by_hand
from tests.support.models import Net, build, data, same
from tests.support.ranks import on_ranks, run_ranks

KINDS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "SGD": optim.SGD,
    "torch AdamW": torch.optim.AdamW,
    "torch SGD": torch.optim.SGD,
}
EACH = pytest.mark.parametrize("kind", list(KINDS))


def made(kind: str, in_place: bool, seed: int = 0) -> tuple[FlatFSDP, Optimizer]:
    model = build(seed=seed)
    if in_place:
        cut_by_hand(model)
    groups = param_groups(model, [{"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}])
    momentum = {"momentum": 0.9} if "SGD" in kind else {}
    return model, KINDS[kind](groups, lr=1e-2, weight_decay=0.1, **momentum)


def train(model: FlatFSDP, optimizer: Optimizer, rank: int, steps: range) -> None:
    for seed in steps:
        ((tokens,),) = data(rank + 10 * seed, 1, 1)
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(model: FlatFSDP) -> list[Tensor]:
    return [group.master.flat.detach() for _, group in named_groups(model)]


def transfer(
    form: str, source: tuple[FlatFSDP, Optimizer], target: tuple[FlatFSDP, Optimizer], folder: str
) -> None:
    if form == "sharded":
        checkpoint.save(folder, *source)
        checkpoint.load(folder, *target)
        return
    checkpoint.load_full_state_dict(target[0], checkpoint.full_state_dict(source[0]))
    rank0_only = form == "of rank 0"
    state = checkpoint.full_optimizer_state_dict(*source, rank0_only=rank0_only)
    checkpoint.load_full_optimizer_state_dict(*target, copy.deepcopy(state), from_rank0=rank0_only)


@EACH
@pytest.mark.parametrize("form", ["full", "of rank 0", "sharded"])
@on_ranks(2)
def test_training_goes_on_in_the_other_form(rank: int, tmp_path: Path, kind: str, form: str) -> None:
    """Trains three steps, loads the state into both forms of optimizer, and trains all of them two more."""
    for in_place in (True, False):
        source = made(kind, in_place)
        train(*source, rank, range(3))
        targets = [made(kind, other, seed=1) for other in (True, False)]
        for number, target in enumerate(targets):
            transfer(form, source, target, str(tmp_path / f"{in_place}-{number}"))
        train(*source, rank, range(3, 5))
        for target in targets:
            train(*target, rank, range(3, 5))
            assert same(masters(target[0]), masters(source[0]))


@EACH
@on_ranks(3)
def test_the_state_is_that_of_flat_parameters(rank: int, kind: str) -> None:
    states = []
    for in_place in (True, False):
        model, optimizer = made(kind, in_place)
        train(model, optimizer, rank, range(2))
        states.append(checkpoint.full_optimizer_state_dict(model, optimizer))
    ours, theirs = states
    assert ours["param_groups"] == theirs["param_groups"]
    assert set(ours["state"]) == set(theirs["state"]) == {name for name, _ in Net().named_parameters()}
    for name, state in theirs["state"].items():
        assert state.keys() == ours["state"][name].keys()
        assert all(torch.equal(value, ours["state"][name][key]) for key, value in state.items())


def saved(rank: int, world_size: int, folder: str, kind: str) -> None:
    model, optimizer = made(kind, True)
    train(model, optimizer, 0, range(2))
    checkpoint.save(folder, model, optimizer)


def loaded(rank: int, world_size: int, folder: str, kind: str, in_place: bool) -> list[Tensor]:
    model, optimizer = made(kind, in_place, seed=1)
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, 0, range(2, 3))
    return list(checkpoint.full_state_dict(model).values())


@EACH
def test_saved_by_three_ranks_loaded_by_one_and_two(tmp_path: Path, kind: str) -> None:
    """The ranks compute the same, so their number changes nothing."""
    run_ranks(3, saved, str(tmp_path), kind)
    results = [
        result
        for world_size in (1, 2)
        for in_place in (True, False)
        for result in run_ranks(world_size, loaded, str(tmp_path), kind, in_place)
    ]
    for result in results[1:]:
        for value, other in zip(result, results[0], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)


@EACH
@on_ranks(2)
def test_saving_copies_no_state(rank: int, kind: str) -> None:
    model, optimizer = made(kind, True)
    train(model, optimizer, rank, range(1))
    own = {
        value.data_ptr()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() and value.numel()
    }
    sharded = (
        value
        for state in sharded_optimizer_state_dict(model, optimizer)["state"].values()
        for value in state.values()
        if isinstance(value, ShardedTensor)
    )
    found = {shard.tensor.data_ptr() for value in sharded for shard in value.local_shards()}
    # A piece that is no box is saved as several, of which the first one begins where it does.
    assert own <= found


@on_ranks(2)
def test_an_ordinary_reader_reads_it(rank: int, tmp_path: Path) -> None:
    """Whole tensors under the original names."""
    model, optimizer = made("AdamW", True)
    train(model, optimizer, rank, range(2))
    full = checkpoint.full_optimizer_state_dict(model, optimizer)
    checkpoint.save(str(tmp_path), model, optimizer)
    target = {
        "optimizer": {
            "state": {name: {"exp_avg": torch.zeros_like(s["exp_avg"])} for name, s in full["state"].items()}
        }
    }
    dcp.load(target, checkpoint_id=str(tmp_path))
    for name, state in target["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], full["state"][name]["exp_avg"])
