"""The optimizer's state in checkpoints: the plain model's, for any groups, frozen layers and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp
from flatfsdp import Precision, by_class, checkpoint, shard
from tests.support.checkpoints import FORMS, Model, adamw, build, equal, full_state, load_form, step, trained
from tests.support.models import Block, Net, plain_net, update
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
@on_ranks(1, 3)
def test_optimizer_state_and_groups_are_those_of_the_plain_model(grouped: bool, flag: bool) -> None:
    """The gathered state is that of torch's optimizer over the plain model's parameters."""
    model = build(0, flag)
    optimizer = adamw(model, grouped)
    plain = plain_net(Model)
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    groups: Any = [{"params": list(named.values())}]
    if grouped:
        low = {name: p for name, p in named.items() if p.dim() < 2}
        rest = [p for name, p in named.items() if name not in low and name != "blocks.1.up.weight"]
        groups = [
            {"params": list(low.values()), "weight_decay": 0.0},
            {"params": [named["blocks.1.up.weight"]], "lr": 3e-2},
            {"params": rest},
        ]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for seed in range(2):
        step(model, optimizer, seed)
        step(plain, reference, seed)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == set(named)
    for name, parameter in named.items():
        for key, value in reference.state[parameter].items():
            torch.testing.assert_close(state["state"][name][key], value, rtol=1e-5, atol=1e-7, msg=name)
    ours = checkpoint.full_state_dict(model)
    torch.testing.assert_close(ours, plain.state_dict(), rtol=1e-5, atol=1e-6)
    for ours_group, group in zip(state["param_groups"], reference.param_groups, strict=True):
        assert {named[name] for name in ours_group["params"]} == set(group["params"])
        assert ours_group["weight_decay"] == group["weight_decay"] and ours_group["lr"] == group["lr"]


@on_ranks(2)
def test_training_goes_on_as_if_never_stopped() -> None:
    """States in the shards' own dtype, and gradients in main_grad."""
    model = build(0, precision=Precision(param=torch.bfloat16, compute=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    step(model, optimizer, 0)
    saved = full_state(model, optimizer)
    assert saved["model"]["cube"].dtype == torch.bfloat16
    other = build(1, precision=Precision(param=torch.bfloat16, compute=torch.bfloat16))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(saved["model"])
    checkpoint.load_full_optimizer_state_dict(other, fresh, saved["optimizer"])
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, o, 1)
    assert equal(full_state(model, optimizer), full_state(other, fresh))


@on_ranks(1, 2)
def test_every_local_shard_counts_its_own_steps() -> None:
    """One state for several local shards: each counts its own steps, and what was saved stays as it was."""
    model, other = build(0), build(1)
    optimizer, resumed = adamw(model, False), adamw(other, True)
    step(model, optimizer, 0)
    state = full_state(model, optimizer)
    saved = {name: {k: v.clone() for k, v in s.items()} for name, s in state["optimizer"]["state"].items()}
    groups = checkpoint.full_optimizer_state_dict(other, resumed)["param_groups"]
    other.load_state_dict(state["model"])
    checkpoint.load_full_optimizer_state_dict(other, resumed, {**state["optimizer"], "param_groups": groups})
    for m, o in ((model, optimizer), (other, resumed)):
        step(m, o, 1)
        step(m, o, 2)
    assert equal(state["optimizer"]["state"], saved)
    for m, o in ((model, optimizer), (other, resumed)):
        steps = [s["step"].item() for s in checkpoint.full_optimizer_state_dict(m, o)["state"].values()]
        assert set(steps) == {3.0}


@on_ranks(2)
def test_states_that_do_not_fit_raise_on_every_rank(rank: int) -> None:
    model, optimizer = trained(1)
    before = full_state(model, optimizer)
    bad = {**before["model"], "cube": 3} if rank == 0 else {}
    with pytest.raises(RuntimeError, match="cube is no tensor, but int"):
        checkpoint.load_full_state_dict(model, bad, from_rank0=True)
    if rank == 0:
        # On one rank only.
        optimizer.state[next(model.parameters())]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"AdamW keeps 'history' \(list\)"):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    optimizer.state[next(model.parameters())].pop("history", None)
    assert equal(full_state(model, optimizer), before)


@on_ranks(2)
def test_a_layer_that_is_unfrozen_joins_without_state(tmp_path: Path) -> None:
    """A layer that was frozen joins as a group of its own; the others keep their state."""
    model, optimizer = trained(1)
    checkpoint.save(tmp_path, model, optimizer)
    before = full_state(model, optimizer)
    net = plain_net(Model)
    net.frozen.requires_grad_(True)
    model = flatfsdp.shard(net, flatfsdp.by_class(Block))
    joining = ["frozen.weight", "frozen.bias"]
    with pytest.raises(ValueError, match="that were frozen then into groups of their own"):
        checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(
        flatfsdp.param_groups(model, [{"params": joining, "lr": 0.5}]), lr=0.1, weight_decay=0.0
    )
    for load_state in (
        lambda: checkpoint.load(tmp_path, model, optimizer),
        lambda: checkpoint.load_full_optimizer_state_dict(model, optimizer, before["optimizer"]),
    ):
        load_state()
        state = checkpoint.full_optimizer_state_dict(model, optimizer)
        found = {n: s for n, s in state["state"].items() if s}
        assert equal(before["optimizer"]["state"], found)
        assert [(group["lr"], group["weight_decay"]) for group in state["param_groups"]] == [
            (0.5, 0.0),
            (1e-2, 1e-2),
        ]
    step(model, optimizer, 1)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)["state"]
    assert [int(state[name]["step"]) for name in ("frozen.bias", "head.bias")] == [1, 2]


@on_ranks(2)
def test_a_tensor_learning_rate_is_saved(tmp_path: Path) -> None:
    """A learning rate that is a tensor, as capturable optimizers have."""
    model = build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    step(model, optimizer, 0)
    checkpoint.save(tmp_path, model, optimizer)
    resumed = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    checkpoint.load(tmp_path, model, resumed)
    assert resumed.param_groups[0]["lr"] == 0.25


@on_ranks(3)
def test_ranks_with_padding_only_resume_as_the_others(rank: int, tmp_path: Path) -> None:
    """The last rank has none of 20 elements in shards of 16."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))

    def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(x).square().sum().backward()
            update(optimizer)

    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = shard(nn.Linear(4, 4))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    trained(model, optimizer, 2)
    checkpoint.save(tmp_path / "sharded", model, optimizer)
    if (state := full_state(model, optimizer)) and rank == 0:
        torch.save(state, f"{tmp_path}/full.pt")
    dist.barrier()
    trained(model, optimizer, 1)
    for form in FORMS:
        other, its_optimizer = made()
        load_form(form, tmp_path, other, its_optimizer, rank)
        trained(other, its_optimizer, 1)
        assert all(map(torch.equal, model.parameters(), other.parameters())), form
        for parameter, other_parameter in zip(model.parameters(), other.parameters(), strict=True):
            if parameter.numel():
                states = optimizer.state[parameter], its_optimizer.state[other_parameter]
                ours, theirs = (dict(sorted(state.items())) for state in states)
                assert equal(ours, theirs), form


@on_ranks(2)
def test_an_optimizer_that_lacks_a_part_on_one_rank_raises_on_all(rank: int, tmp_path: Path) -> None:
    """Some programs drop parameters that equal another one, as all parts without elements do."""
    model = shard(Net(), by_class(Block))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[rank:], lr=0.1)
    with pytest.raises(ValueError, match="parts without elements"):
        checkpoint.save(tmp_path, model, optimizer)
