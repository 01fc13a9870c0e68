"""Parameters that no step has used have no optimizer state, though others of their shard have some.

Checkpoints neither lose states nor make any up, and every parameter keeps its own step count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from flatfsdp import by_class, checkpoint, optim, shard
from flatfsdp.checkpoint.sharded import sharded_optimizer_state_dict
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from tests.support.checkpoints import Model, equal
from tests.support.models import Block, data, plain_net, update
from tests.support.ranks import on_ranks, run_ranks

KINDS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": optim.AdamW,
    "SGD": optim.SGD,
    "torch AdamW": torch.optim.AdamW,
    "torch SGD": torch.optim.SGD,
}
EACH = pytest.mark.parametrize("kind", list(KINDS))
# Forms that go by names differ in how they travel, not in what the kind of optimizer has.
FORMS_AND_KINDS = [
    *(("sharded", kind) for kind in KINDS),
    ("full", "AdamW"),
    ("full", "torch SGD"),
    ("of rank 0", "SGD"),
    ("torch.distributed.checkpoint", "torch AdamW"),
    ("own", "SGD"),
    ("own", "torch AdamW"),
]

NEVER = ("blocks.0.up.weight", "blocks.1.", "head.bias")
"""No step has gradients of these: a parameter amid others, a whole unit, the last one of its unit."""
ODD = ("blocks.0.norm.bias", "scale")
"""Only steps 1, 3, ... have gradients of these."""
FIRST = ("cube",)
"""Only step 0 has a gradient of this."""


def made(kind: str, seed: int = 0) -> tuple[Any, Optimizer]:
    torch.manual_seed(seed)
    model = shard(Model(), by_class(Block))
    return model, optimizer_of(kind, model)


def optimizer_of(kind: str, model: nn.Module) -> Optimizer:
    momentum = {"momentum": 0.9, "dampening": 0.5} if "SGD" in kind else {}
    trained = [each for each in model.parameters() if each.requires_grad]
    return KINDS[kind](trained, lr=1e-2, weight_decay=0.1, **momentum)


def train(model: nn.Module, optimizer: Optimizer, steps: range, seed: int = 0) -> None:
    """The same batch on all ranks, so that their number changes nothing."""
    for step in steps:
        ((tokens,),) = data(seed + 10 * step, 1, 1)
        model(tokens).backward()
        absent = NEVER + (() if step % 2 else ODD) + (FIRST if step else ())
        for name, parameter in model.named_parameters():
            if name.startswith(absent):
                parameter.grad = None
        update(optimizer)


def transfer(
    form: str, source: tuple[Any, Optimizer], target: tuple[Any, Optimizer], folder: str, rank: int
) -> None:
    if form == "sharded":
        checkpoint.save(folder, *source)
        checkpoint.load(folder, *target)
        return
    checkpoint.load_full_state_dict(target[0], checkpoint.full_state_dict(source[0]))
    if form == "own":
        target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
    elif form == "torch.distributed.checkpoint":
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(*target, get_optimizer_state_dict(*source, options=options), options=options)
    else:
        from_rank0 = form == "of rank 0"
        state = checkpoint.full_optimizer_state_dict(*source, rank0_only=from_rank0)
        checkpoint.load_full_optimizer_state_dict(*target, copy.deepcopy(state), from_rank0=from_rank0)


def whole(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    # Loading may change the order of options.
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    # A copy, because buffers go on changing.
    return copy.deepcopy(
        {"model": checkpoint.full_state_dict(model), "state": state["state"], "param_groups": groups}
    )


def with_state(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Names of the parameters that have state on this rank; parts without elements are left out."""
    return {name for name, p in model.named_parameters() if optimizer.state.get(p) and p.numel()}


@EACH
@on_ranks(2)
def test_states_and_step_counts_are_those_of_plain_pytorch(kind: str) -> None:
    model, optimizer = made(kind)
    plain = plain_net(Model)
    reference = optimizer_of("torch " + kind.removeprefix("torch "), plain)
    for each in ((model, optimizer), (plain, reference)):
        train(*each, range(3))
    found = checkpoint.full_optimizer_state_dict(model, optimizer)
    names = {p: name for name, p in plain.named_parameters()}
    expected = {names[p]: state for p, state in reference.state.items()}
    assert found["state"].keys() == expected.keys()
    for name, state in expected.items():
        for key, value in state.items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=1e-5, atol=1e-7, msg=name)
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert set(found["param_groups"][0]["params"]) == trained > expected.keys()


@pytest.mark.parametrize(("form", "kind"), FORMS_AND_KINDS)
@on_ranks(2)
def test_training_goes_on_with_the_same_bits(rank: int, tmp_path: Path, kind: str, form: str) -> None:
    """Also in an optimizer that has states of all parameters: those that were not saved are gone."""
    source, fresh, used = made(kind), made(kind, seed=1), made(kind, seed=2)
    train(*source, range(3))
    used[0](next(data(7, 1, 1))[0]).backward()
    update(used[1])
    expected = whole(*source)
    for number, target in enumerate((fresh, used)):
        transfer(form, source, target, str(tmp_path / str(number)), rank)
        assert with_state(*target) == with_state(*source)
        assert equal(whole(*target), expected)
    for each in (source, fresh, used):
        train(*each, range(3, 6))
    assert equal(whole(*fresh), whole(*source)) and equal(whole(*used), whole(*source))


def saved(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    model, optimizer = made(kind)
    train(model, optimizer, range(3))
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
    return whole(model, optimizer)


def loaded(rank: int, world_size: int, folder: str, kind: str) -> list[dict[str, Any]]:
    states = []
    for form in ("sharded", "full"):
        model, optimizer = made(kind, seed=1)
        checkpoint.load(f"{folder}/sharded", model, optimizer if form == "sharded" else None)
        if form == "full":
            checkpoint.load_full_optimizer_state_dict(model, optimizer, torch.load(f"{folder}/full.pt"))
        states.append(whole(model, optimizer))
        train(model, optimizer, range(3, 5))
        assert not any(name.startswith(NEVER) for name in with_state(model, optimizer))
    return states


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("AdamW", 2, 1), ("SGD", 1, 2), ("torch AdamW", 1, 2), ("torch SGD", 2, 1)]
)
def test_another_number_of_ranks_loads_the_same_states(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    expected = run_ranks(before, saved, str(tmp_path), kind)[0]
    for states in run_ranks(after, loaded, str(tmp_path), kind):
        assert all(equal(state, expected) for state in states)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("sharded", "AdamW"), ("sharded", "torch SGD"), ("full", "torch SGD"), ("of rank 0", "AdamW")],
)
@on_ranks(2)
def test_a_parameter_without_dimensions_alone_has_states(
    rank: int, tmp_path: Path, kind: str, form: str
) -> None:
    """Its moments have no dimensions either, as if they were single numbers."""
    source, target = made(kind), made(kind, seed=1)
    model, optimizer = source
    model(next(data(0, 1, 1))[0]).backward()
    for name, parameter in model.named_parameters():
        if name != "scale":
            parameter.grad = None
    update(optimizer)
    transfer(form, source, target, str(tmp_path), rank)
    assert equal(whole(*target), whole(*source))
    for each in (source, target):
        train(*each, range(1, 3))
    assert equal(whole(*target), whole(*source))


@EACH
@on_ranks(2)
def test_a_manager_and_the_memory_report_count_what_is_there(tmp_path: Path, kind: str) -> None:
    source, target = made(kind), made(kind, seed=1)
    train(*source, range(2))
    manager = checkpoint.CheckpointManager(tmp_path)
    assert manager.save(2, *source)
    resumed = manager.resume(*target)
    assert resumed is not None and resumed.step == 2
    assert equal(whole(*target), whole(*source))
    model, optimizer = source
    states = [value for state in optimizer.state.values() for value in state.values()]
    row = next(row for row in model.memory_report(optimizer).rows if row.buffer == "optimizer state")
    assert row.total == sum(value.nbytes for value in states)


@on_ranks(2)
def test_flat_parameters_take_the_states_of_whole_units_or_raise(tmp_path: Path) -> None:
    """A flat parameter has one state; nothing has changed if the saved ones are not alike."""
    model, optimizer = made("torch AdamW")
    torch.manual_seed(1)
    net = Model()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block)
    flat = FullyShardedDataParallel(net)
    target = torch.optim.AdamW(flat.parameters(), lr=1e-2)
    for step, absent in enumerate((("blocks.1.",), ("blocks.0.up.weight",))):
        model(next(data(step, 1, 1))[0]).backward()
        for name, parameter in model.named_parameters():
            if name.startswith(absent):
                parameter.grad = None
        update(optimizer)
        folder = tmp_path / str(step)
        checkpoint.save(folder, model, optimizer)
        if step == 0:
            checkpoint.load(folder, flat, target)
            assert equal(whole(flat, target), whole(model, optimizer))
    before = whole(flat, target)
    with pytest.raises(ValueError, match="one of them is missing"):
        checkpoint.load(folder, flat, target)
    assert equal(whole(flat, target), before)


@EACH
@on_ranks(2)
def test_saving_copies_no_state(kind: str) -> None:
    model, optimizer = made(kind)
    train(model, optimizer, range(1))
    own = {
        value.data_ptr()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() and value.numel()
    }
    states = sharded_optimizer_state_dict(model, optimizer)["state"].values()
    parts = (value for state in states for value in state.values() if isinstance(value, ShardedTensor))
    # A piece that is no box is saved as several, of which the first one begins where it does.
    assert own <= {part.tensor.data_ptr() for value in parts for part in value.local_shards()}
